// Curves of the figures by step. A click on a step opens it everywhere.
const matching = (pattern) => (keys) => keys.filter((key) => pattern.test(key));
const CHARTS = [
  ["reward", "reward", matching(/^reward\/([^/]+\/)?mean$/)],
  ["heldout", "heldout", matching(/^eval[^/]*\/[^/]+\/mean$/)],
  ["heldout", "pass", matching(/^eval[^/]*\/.*pass@([2-9]|\d\d+)$/)],
  ["policy", "kl", matching(/^kl$/)],
  ["policy", "entropy", matching(/^entropy$/)],
  ["policy", "clip", matching(/^clip_fraction/)],
  ["policy", "zero", matching(/^zero_std_fraction$/)],
  ["gap", "gap", matching(/^logprob_gap\//), true],
  ["optimizer", "grad", matching(/^grad_norm$/)],
  ["optimizer", "loss", matching(/^loss$/)],
  ["optimizer", "lr", matching(/^lr$/)],
  ["length", "length", matching(/^completion_length\//)],
  ["length", "truncated", matching(/^truncated_fraction$/)],
  ["time", "time", matching(/^time\//)],
  ["memory", "memory", matching(/^memory\/(?!device_peak)|^host_device_bytes$/)],
  ["memory", "peak", matching(/^memory\/device_peak(_planned)?\//)],
];
const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
let plots = [];

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hasFigures = (key) => RUNS.some((run) => run.figures.columns[key]?.some((value) => value !== null));

// [group, title, keys, logarithmic] of every chart that has figures; what no chart names is one of "other".
function charts() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.figures.columns)))].filter(hasFigures);
  const named = CHARTS.map(([group, name, choose, isLog]) => [group, word(`chart_${name}`), choose(keys), isLog]);
  const used = new Set(named.flatMap(([, , own]) => own));
  const varies = (key) => RUNS.some((run) => run.figures.columns[key]?.some((value) => value));
  const others = keys.filter((key) => !used.has(key) && varies(key)).map((key) => ["other", key, [key], false]);
  return [...named, ...others].filter(([, , own]) => own.length)
    .map(([group, name, own, isLog]) => (isZero(own) ? [group, word("zero_in_all", name), own, false] : [group, name, own, isLog]));
}

// Logarithmic axes show nothing of figures that are all 0, and others a line that is easily missed.
function isZero(keys) {
  return keys.every((key) => RUNS.every((run) => (run.figures.columns[key] ?? []).every((value) => !value)));
}

function smoothed(values) {
  if (!state.smoothing) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : state.smoothing * mean + (1 - state.smoothing) * value;
    return mean;
  });
}

function shortKey(key) {
  const text = key.replace(/^(reward|eval|time|memory\/device_peak|memory|logprob_gap|completion_length)\//, "");
  return text === "mean" && key === "reward/mean" ? word("total") : text.replace(/(.)\/mean$/, "$1");
}

// The steps of all runs, and a series for each key of each run.
function seriesOf(keys, isLog) {
  const steps = [...new Set(RUNS.flatMap((run) => run.figures.steps))].sort((a, b) => a - b);
  const series = [];
  for (const [number, key] of keys.entries()) {
    for (const [index, run] of RUNS.entries()) {
      const column = run.figures.columns[key];
      if (!column) continue;
      const usable = isLog ? column.map((value) => (value > 0 ? value : null)) : column;
      const bySteps = new Map(smoothed(usable).map((value, i) => [run.figures.steps[i], value]));
      const label = RUNS.length > 1 ? `${shortKey(key)} · ${"AB"[index]}` : shortKey(key);
      series.push({ label, number, index, values: steps.map((step) => bySteps.get(step) ?? null) });
    }
  }
  return { steps, series };
}

function markStep(plot) {
  if (state.step === null) return;
  const x = Math.round(plot.valToPos(state.step, "x", true));
  const { left, top, width, height } = plot.bbox;
  if (x < left || x > left + width) return;
  plot.ctx.fillStyle = colourOf("--accent");
  plot.ctx.globalAlpha = 0.5;
  plot.ctx.fillRect(x - 1, top, 2, height);
  plot.ctx.globalAlpha = 1;
}

function axisOf(properties) {
  const grid = { stroke: colourOf("--line"), width: 1 };
  return { stroke: colourOf("--quiet"), grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif", ...properties };
}

function compact(value) {
  return Math.abs(value) >= 1e4 ? value.toLocaleString("en", { notation: "compact" }) : figure(value);
}

// Of figures that are all 0, up to 1: many are fractions.
function yRange(_, low, high) {
  if (low === 0 && high === 0) return [0, 1];
  return low === null ? [null, null] : uPlot.rangeNum(low, high, 0.1, true);
}

function options(width, data, isLog) {
  const lines = data.series.map(({ label, number, index, values }) => {
    const count = values.filter((value) => value !== null).length;
    return {
      label,
      stroke: colourOf(PALETTE[number % PALETTE.length]),
      width: 1.6,
      dash: index ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: count <= 40, size: count === 1 ? 7 : 4, fill: colourOf("--card") },
      value: (_, value) => figure(value),
    };
  });
  return {
    width,
    height: 190,
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: yRange } },
    series: [{ label: word("step") }, ...lines],
    axes: [
      axisOf({ size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }),
      axisOf({ size: 54, values: (_, values) => values.map((value) => (value === null ? "" : compact(value))) }),
    ],
    cursor: { sync: { key: "steps" }, points: { size: 6 } },
    hooks: { draw: [markStep] },
  };
}

function spoken(name, data) {
  const { label, values } = data.series[0];
  const known = values.map((value, i) => [value, data.steps[i]]).filter(([value]) => value !== null);
  const [first, last] = [known[0], known[known.length - 1]];
  return word("chart_label", `${name}, ${label}`, figure(first?.[0]), first?.[1], figure(last?.[0]), last?.[1]);
}

function drawChart(holder, name, keys, isLog) {
  const data = seriesOf(keys, isLog);
  holder.setAttribute("aria-label", spoken(name, data));
  const values = [data.steps, ...data.series.map((series) => series.values)];
  const plot = new uPlot(options(holder.clientWidth, data, isLog), values, holder);
  let pressed = 0;
  plot.over.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    // A drag zooms.
    if (Math.abs(event.clientX - pressed) > 3) return;
    const left = event.clientX - plot.over.getBoundingClientRect().left;
    openStep(data.steps[plot.posToIdx(left)], true);
  });
  plots.push({ plot, holder });
}

function groupChips(all) {
  const names = [...new Set(all.map(([group]) => group))];
  const chips = names.map((name) => element("button", {
    type: "button",
    class: "chip",
    "aria-pressed": String(state.curveGroups.has(name)),
    onclick: () => {
      if (!state.curveGroups.delete(name)) state.curveGroups.add(name);
      renderCurves();
      byId("curves").querySelector(`[data-group="${name}"]`).focus();
    },
    "data-group": name,
  }, word(`group_${name}`)));
  return element("div", { class: "chips", role: "group", "aria-label": word("groups") }, chips);
}

function renderCurves() {
  plots.forEach(({ plot }) => plot.destroy());
  plots = [];
  const all = charts();
  const chosen = all.filter(([group]) => state.curveGroups.has(group));
  const smoothing = element("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: String(state.smoothing),
    onchange: (event) => { state.smoothing = Number(event.target.value); renderCurves(); byId("smoothing").focus(); } });
  smoothing.id = "smoothing";
  const thinned = RUNS.filter(({ figures }) => figures.steps.length < figures.num_steps).map(({ figures }) =>
    element("p", { class: "quiet" }, word("thinned", figure(figures.steps.length), figure(figures.num_steps))));
  const holders = chosen.map(([, name]) => element("figure", { class: "chart" },
    element("figcaption", {}, name), element("div", { class: "plot", role: "img" })));
  const names = RUNS.length > 1 ? RUNS.map((run, i) => element("span", { class: "quiet" }, `${"AB"[i]} ${i ? "┄" : "─"} ${run.name}`)) : [];
  byId("curves").replaceChildren(title("curves"),
    element("div", { class: "tools" }, groupChips(all), labelled(word("smoothing"), smoothing), names),
    element("p", { class: "quiet" }, word("curves_hint")), ...thinned,
    chosen.length ? element("div", { class: "charts" }, holders) : element("p", {}, word("no_curves")));
  chosen.forEach(([, name, keys, isLog], i) => drawChart(holders[i].querySelector(".plot"), name, keys, isLog));
}

function redrawCurves() {
  plots.forEach(({ plot }) => plot.redraw(false));
}

function resizeCurves() {
  for (const { plot, holder } of plots) {
    if (holder.clientWidth && holder.clientWidth !== plot.width) plot.setSize({ width: holder.clientWidth, height: 190 });
  }
}
