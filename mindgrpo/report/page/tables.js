// Time and memory by phase, and the configuration with the origin of each value.
function bar(share) {
  const fill = element("span", { class: "fill" });
  fill.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  return element("td", { class: "share" }, element("span", { class: "track" }, fill), `${(100 * share).toFixed(1)} %`);
}

function phaseTable(run) {
  const columns = Object.keys(run.figures.columns);
  const phases = columns.filter((key) => key.startsWith("time/")).map((key) => key.slice(5)).filter((name) => name !== "step" && name !== "score_hidden");
  const peaks = columns.filter((key) => key.startsWith("memory/device_peak/")).map((key) => key.slice(19));
  const names = [...new Set([...phases, ...peaks])];
  if (!names.length) return element("p", { class: "quiet" }, word("no_phases"));
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const whole = sum(known(run, "time/step")) || sum(phases.flatMap((name) => known(run, `time/${name}`)));
  const cell = (text) => element("td", { class: "number" }, text);
  const rows = [...names, "step"].map((name) => {
    const times = known(run, `time/${name}`);
    const peak = known(run, `memory/device_peak/${name}`);
    return element("tr", {}, element("th", { scope: "row" }, name),
      cell(figure(median(times))), cell(times.length ? figure(sum(times) / times.length) : "–"), cell(figure(times[times.length - 1])),
      cell(times.length ? duration(sum(times)) : "–"), times.length && whole ? bar(sum(times) / whole) : cell("–"),
      cell(peak.length ? bytes(peak.reduce((most, value) => Math.max(most, value), 0)) : "–"));
  });
  const heads = ["phase", "median", "mean", "last", "sum", "share", "peak"].map((name) => word(name));
  const resident = known(run, "memory/rss");
  const most = resident.reduce((largest, value) => Math.max(largest, value), 0);
  return [table(heads, rows, { label: word("phases") }),
    resident.length ? element("p", { class: "quiet" }, word("rss", bytes(most))) : null];
}

function renderPhases() {
  const tables = RUNS.flatMap((run, i) => [RUNS.length > 1 ? element("h3", {}, `${"AB"[i]}: ${run.name}`) : null, phaseTable(run)].flat());
  byId("phases").replaceChildren(title("phases"), ...tables.filter(Boolean));
}

// [key, (value, origin) of each run], in the order of the first run that has the key.
function keyRows() {
  const rows = new Map();
  RUNS.forEach((run, i) => run.configuration.forEach(([key, value, origin]) => {
    if (!rows.has(key)) rows.set(key, RUNS.map(() => null));
    rows.get(key)[i] = { value, origin };
  }));
  return [...rows];
}

function renderKeys() {
  const { search, setOnly, differing } = state.keys;
  const all = keyRows();
  const differs = (cells) => cells.some((cell) => cell?.value !== cells[0]?.value);
  const rows = all.filter(([key, cells]) => (!search || `${key} ${cells.map((cell) => cell?.value).join(" ")}`.toLowerCase().includes(search.toLowerCase()))
    && (!setOnly || search || cells.some((cell) => cell && cell.origin !== "default"))
    && (RUNS.length === 1 || !differing || differs(cells)));
  const heads = [word("key"), ...RUNS.flatMap((_, i) => {
    const mark = RUNS.length > 1 ? ` ${"AB"[i]}` : "";
    return [word("value") + mark, word("origin") + mark];
  })];
  const lines = rows.map(([key, cells]) => element("tr", { class: RUNS.length > 1 && differs(cells) ? "differs" : null },
    element("th", { scope: "row" }, element("code", {}, key)),
    cells.flatMap((cell) => [element("td", {}, element("code", {}, cell?.value ?? "–")), element("td", { class: "quiet" }, cell?.origin ?? "–")])));
  byId("keys").replaceChildren(element("p", { class: "quiet" }, word("keys_shown", rows.length, all.length)),
    table(heads, lines, { label: word("configuration") }));
}

function renderConfiguration() {
  if (!RUNS.some((run) => run.configuration.length)) {
    byId("configuration").replaceChildren(title("configuration"), element("p", { class: "quiet" }, word("nothing")));
    return;
  }
  const change = (key) => (value) => { state.keys[key] = value; renderKeys(); };
  const search = element("input", { type: "search", value: state.keys.search, oninput: (event) => change("search")(event.target.value) });
  byId("configuration").replaceChildren(title("configuration"),
    element("div", { class: "tools" }, labelled(word("find_key"), search),
      checkbox(word("set_only"), state.keys.setOnly, change("setOnly")),
      RUNS.length > 1 ? checkbox(word("differing"), state.keys.differing, change("differing")) : null),
    element("div", { id: "keys" }));
  renderKeys();
}
