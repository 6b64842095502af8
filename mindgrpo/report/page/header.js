// The head of the page: what ran, how it ended, its main figures and warnings.
function ends(run, key) {
  const values = known(run, key);
  return values.length ? [values[0], values[values.length - 1]] : null;
}

function tile(label, value, note) {
  return element("div", { class: "tile" }, element("span", { class: "tile-label" }, label),
    element("span", { class: "tile-value" }, value), note ? element("span", { class: "tile-note" }, note) : null);
}

function arrow(pair) {
  return pair[0] === pair[1] ? figure(pair[1]) : `${figure(pair[0])} → ${figure(pair[1])}`;
}

function tiles(run) {
  const { steps, max_steps: most, seconds, best } = run.ending;
  const shown = [tile(word("steps"), figure(steps), most && most !== steps ? word("of_steps", figure(most)) : null)];
  const reward = ends(run, "reward/mean");
  if (reward) shown.push(tile(word("reward"), arrow(reward), word("first_to_last")));
  for (const key of Object.keys(run.figures.columns)) {
    const match = /^eval\/([^/]+)\/mean$/.exec(key);
    if (match) shown.push(tile(word("held_out_mean", match[1]), arrow(ends(run, key)), word("before_after")));
  }
  if (best) shown.push(tile(word("best"), figure(best.score), word("best_at", best.step)));
  if (seconds !== null) {
    const times = known(run, "time/step");
    const note = times.length ? word("seconds_a_step", duration(median(times))) : null;
    shown.push(tile(word("duration"), duration(seconds), note));
  }
  return element("div", { class: "tiles" }, shown);
}

function endingPill(ending) {
  const kind = ending.is_complete === null ? "no_end" : ending.is_complete ? "complete" : "ended_early";
  return element("span", { class: `pill ${kind}` }, word(kind));
}

function warningLines(run) {
  const { is_complete: isComplete, reason } = run.ending;
  const lines = run.warnings.map(([code, ...args]) => word(code, ...args));
  if (isComplete === null) lines.unshift(word("no_end_why"));
  if (isComplete === false) lines.unshift(word("ended_why", reason));
  return lines;
}

function runHeader(run, index) {
  const { ended, seconds, is_complete: isComplete } = run.ending;
  const times = seconds === null ? [] : [["started", moment(ended - seconds)]];
  times.push([isComplete === null ? "last_written" : "ended", moment(ended)]);
  const facts = [...run.facts, ...times].map(([name, text]) =>
    element("div", {}, element("dt", {}, word(`fact_${name}`)), element("dd", {}, text)));
  const lines = warningLines(run);
  return element("article", { class: "run" },
    element("h1", {}, RUNS.length > 1 ? `${"AB"[index]}: ${run.name}` : run.name, " ", endingPill(run.ending)),
    tiles(run),
    lines.length ? element("div", { class: "warnings", role: "note" }, element("strong", {}, word("warnings")),
      element("ul", {}, lines.map((line) => element("li", {}, line)))) : null,
    element("dl", { class: "facts" }, facts),
    run.rewardOutput ? element("details", {}, element("summary", {}, word("reward_output")),
      element("pre", {}, run.rewardOutput)) : null);
}

function renderHeader() {
  const written = word("written", DATA.version, moment(RUNS[0].ending.written));
  byId("overview").replaceChildren(
    element("div", { class: RUNS.length > 1 ? "runs two" : "runs" }, RUNS.map(runHeader)),
    element("p", { class: "quiet" }, written));
}
