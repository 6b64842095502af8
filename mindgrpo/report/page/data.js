// The run's data: one block for the whole page, and one for each step that is read when the step is opened.
const DATA = JSON.parse(byId("data").textContent);
const RUNS = DATA.runs;
const NO_FILTERS = { search: "", finish: "", advantage: "", minReward: "", maxReward: "", minLength: "", maxLength: "" };

const state = {
  run: 0,
  step: null,
  colour: "none",
  sort: "order",
  descending: true,
  filters: { ...NO_FILTERS },
  curveGroups: new Set(["reward", "heldout", "policy", "gap", "optimizer", "length"]),
  smoothing: 0,
  answers: { show: "all", search: "", limit: 20 },
  keys: { search: "", setOnly: true, differing: RUNS.length > 1 },
};

const stepCache = new Map();

function stepData(run, step) {
  const id = `step-${run}-${step}`;
  if (!stepCache.has(id)) {
    const block = byId(id);
    stepCache.set(id, block ? JSON.parse(block.textContent) : null);
  }
  return stepCache.get(id);
}

// The figures of a key, without the steps that have none.
function known(run, key) {
  return (run.figures.columns[key] ?? []).filter((value) => value !== null);
}

function median(values) {
  if (!values.length) return null;
  const [ordered, half] = [[...values].sort((a, b) => a - b), values.length / 2];
  return (ordered[Math.ceil(half) - 1] + ordered[Math.floor(half)]) / 2;
}

function nearest(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
}

// The step whose samples are shown: that of the state, or the nearest one that the page has samples of.
function shownStep() {
  const steps = RUNS[state.run].samples.steps;
  return steps.length ? nearest(steps, state.step ?? steps[steps.length - 1]) : null;
}

function decoded(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// Float16 values, little-endian, in base64.
function halves(text) {
  const view = decoded(text);
  return Float32Array.from({ length: view.length / 2 }, (_, i) => fromHalf(view[2 * i] | (view[2 * i + 1] << 8)));
}

// A sample's array by name, decoded once; null where there is none.
function arrayOf(sample, name) {
  if (!sample.arrays || !sample.arrays[name]) return null;
  sample.decoded ??= {};
  sample.decoded[name] ??= halves(sample.arrays[name]);
  return sample.decoded[name];
}

// The text of each token; null where tokens have no texts of their own.
function tokensOf(sample) {
  if (!sample.lengths) return null;
  if (!sample.tokens) {
    sample.tokens = [];
    let start = 0;
    let length = 0;
    for (const byte of decoded(sample.lengths)) {
      length += byte;
      if (byte === 255) continue;
      sample.tokens.push(sample.text.slice(start, start + length));
      start += length;
      length = 0;
    }
  }
  return sample.tokens;
}
