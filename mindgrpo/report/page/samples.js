// The samples of a step: which step, which colours, how they are sorted, and which of them match.
function sampleTotals(data) {
  return data.groups.flatMap((group) => group.samples);
}

function matches(sample, prompt) {
  const { search, finish, advantage, minReward, maxReward, minLength, maxLength } = state.filters;
  const within = (value, low, high) =>
    (low === "" || (value !== null && value >= Number(low))) && (high === "" || (value !== null && value <= Number(high)));
  const signs = { positive: 1, zero: 0, negative: -1 };
  return (!finish || sample.finish === finish)
    && (!advantage || (sample.advantage !== null && Math.sign(sample.advantage) === signs[advantage]))
    && within(sample.total, minReward, maxReward)
    && within(sample.length, minLength, maxLength)
    && (!search || `${sample.text}\n${prompt}`.toLowerCase().includes(search.toLowerCase()));
}

const SORTS = {
  order: (sample) => sample.number,
  reward: (sample) => sample.total,
  advantage: (sample) => sample.advantage,
  length: (sample) => sample.length,
};

function sorted(samples) {
  if (state.sort === "order") return samples;
  const key = SORTS[state.sort];
  const sign = state.descending ? -1 : 1;
  return [...samples].sort((a, b) => sign * ((key(a) ?? -Infinity) - (key(b) ?? -Infinity)) || a.number - b.number);
}

// Opens a step of the run; `scrolls` where the samples may be out of sight.
function openStep(step, scrolls = false) {
  state.step = step;
  redrawCurves();
  renderSamples();
  say(word("step_opened", step));
  if (scrolls) byId("samples").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

// The step `offset` places after the shown one, among those that can be shown.
function moveStep(offset) {
  const { samples, figures } = RUNS[state.run];
  const steps = samples.steps.length ? samples.steps : figures.steps;
  const at = steps.indexOf(nearest(steps, state.step ?? steps[steps.length - 1]));
  const next = steps[Math.min(steps.length - 1, Math.max(0, at + offset))];
  if (next !== undefined && next !== state.step) openStep(next);
}

function stepTools(run) {
  const shown = shownStep();
  const steps = run.samples.steps;
  const move = (offset, text, name) => element("button", {
    type: "button", class: "icon", "aria-label": word(name), title: word(name), id: `step-${name}`,
    disabled: shown === steps[offset < 0 ? 0 : steps.length - 1],
    onclick: () => { moveStep(offset); byId(`step-${name}`).focus(); },
  }, text);
  const chooser = select(steps.map((step) => [step, String(step)]), shown, (value) => {
    openStep(Number(value));
    byId("step-chooser").focus();
  }, { id: "step-chooser" });
  const runs = RUNS.length > 1 ? labelled(word("run"), select(RUNS.map((one, i) => [i, `${"AB"[i]}: ${one.name}`]), state.run, (value) => {
    state.run = Number(value);
    renderSamples();
  })) : null;
  return [runs, element("div", { class: "field steps" }, element("span", {}, word("step")),
    element("div", { class: "row" }, move(-1, "←", "previous"), chooser, move(1, "→", "next")))];
}

function filterTools(data) {
  const change = (key) => (event) => {
    state.filters[key] = event.target?.value ?? event;
    renderGroups();
  };
  const number = (label, key) => labelled(label, element("input", {
    type: "number", step: "any", class: "short", value: state.filters[key], oninput: change(key), name: key }));
  const reasons = [...new Set(sampleTotals(data).map((sample) => sample.finish))].filter(Boolean).sort();
  const finishes = [["", word("any")], ...reasons.map((reason) => [reason, reason])];
  const signs = [["", word("any")], ...["positive", "zero", "negative"].map((sign) => [sign, word(sign)])];
  return [
    labelled(word("search"), element("input", { type: "search", id: "search", value: state.filters.search,
      placeholder: word("search_hint"), oninput: change("search") })),
    labelled(word("finish"), select(finishes, state.filters.finish, change("finish"), { name: "finish" })),
    labelled(word("advantage"), select(signs, state.filters.advantage, change("advantage"), { name: "advantage" })),
    number(word("min_reward"), "minReward"), number(word("max_reward"), "maxReward"),
    number(word("min_length"), "minLength"), number(word("max_length"), "maxLength"),
    element("button", { type: "button", id: "reset", onclick: () => { state.filters = { ...NO_FILTERS }; renderSamples(); byId("reset").focus(); } }, word("reset")),
  ];
}

function viewTools(run) {
  const colours = ["none", ...coloursOf(run)].map((name) => [name, word(`colour_${name}`)]);
  const sorts = Object.keys(SORTS).map((name) => [name, word(`sort_${name}`)]);
  return [
    labelled(word("colour"), select(colours, sharedColour(run), (value) => { state.colour = value; renderGroups(); }, { name: "colour" })),
    labelled(word("sort"), select(sorts, state.sort, (value) => { state.sort = value; renderGroups(); }, { name: "sort" })),
    checkbox(word("descending"), state.descending, (value) => { state.descending = value; renderGroups(); }),
  ];
}

// The step's main figures, as metrics.jsonl has them.
function stepFigures(run, step) {
  const row = run.figures.steps.indexOf(step);
  const names = ["reward/mean", "kl", "entropy", "grad_norm", "clip_fraction", "logprob_gap/max", "completion_length/mean", "time/step"];
  const known = names.filter((name) => row >= 0 && (run.figures.columns[name]?.[row] ?? null) !== null);
  return element("div", { class: "figures" }, known.map((name) =>
    element("span", {}, element("span", { class: "quiet" }, name), " ", figure(run.figures.columns[name][row]))));
}

function bounds(run) {
  const { numShown, numSamples, steps, numSteps } = run.samples;
  return numShown === numSamples
    ? word("all_samples", figure(numSamples), figure(numSteps))
    : word("shown_samples", figure(numShown), figure(numSamples), figure(steps.length), figure(numSteps));
}

function renderSamples() {
  const run = RUNS[state.run];
  const step = shownStep();
  if (step === null) {
    byId("samples").replaceChildren(title("samples"), element("p", { class: "quiet" }, word("nothing")));
    return;
  }
  const data = stepData(state.run, step);
  const notes = [`${bounds(run)} ${word("keys_hint")}`];
  if (!run.samples.arrays.length) notes.push(word("no_arrays"));
  if (state.step !== null && state.step !== step) notes.push(word("nearest", state.step));
  byId("samples").replaceChildren(title("samples"),
    element("p", { class: "quiet" }, notes.join(" ")),
    element("div", { class: "tools" }, stepTools(run), viewTools(run)),
    element("div", { class: "tools" }, filterTools(data)),
    stepFigures(run, step),
    element("div", { id: "groups" }));
  renderGroups();
}
