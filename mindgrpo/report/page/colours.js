// Colours of tokens by a figure of each: blue and orange for its two signs, violet for amounts.
const COLOURS = ["gap", "log_ratio", "kl", "entropy", "logprob", "advantage", "value"];
const SIGNED = new Set(["gap", "log_ratio", "advantage", "value"]);
const ABOVE = "37, 99, 235";
const BELOW = "234, 88, 12";
const AMOUNT = "124, 58, 237";

function coloursOf(run) {
  return COLOURS.filter((name) => name === "advantage" || run.samples.arrays.includes(name));
}

function sharedColour(run) {
  return coloursOf(run).includes(state.colour) ? state.colour : "none";
}

function tokenValues(sample, colour) {
  if (colour !== "advantage") return arrayOf(sample, colour);
  if (sample.advantage === null) return null;
  const values = new Float32Array(tokensOf(sample)?.length ?? 1).fill(sample.advantage);
  const ratios = arrayOf(sample, "log_ratio");
  // What the policy did not write has no ratio, and no advantage.
  return sample.turns && ratios ? values.map((value, index) => (Number.isNaN(ratios[index]) ? NaN : value)) : values;
}

// The figure that gets the full colour: all but a hundredth of the step's tokens are within it.
function scaleOf(data, colour) {
  const sizes = [];
  for (const group of data.groups) {
    for (const sample of group.samples) {
      for (const value of tokenValues(sample, colour) ?? []) {
        if (Number.isFinite(value)) sizes.push(Math.abs(value));
      }
    }
  }
  sizes.sort((a, b) => a - b);
  return sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

function background(value, scale, colour) {
  if (!Number.isFinite(value) || value === 0) return "";
  const rgb = SIGNED.has(colour) ? (value > 0 ? ABOVE : BELOW) : AMOUNT;
  const part = Math.min(1, Math.abs(value) / scale);
  return part < 0.02 ? "" : `rgba(${rgb}, ${(0.65 * Math.sqrt(part)).toFixed(3)})`;
}

// Which tokens the update clipped: 1 at the upper end of the ratio, -1 at the lower one.
function clippedTokens(sample, rules) {
  const logs = arrayOf(sample, "log_ratio");
  if (!logs || !rules || sample.advantage === null) return null;
  // What the policy did not write has no ratio.
  const written = logs.filter((value) => !Number.isNaN(value));
  const mean = written.reduce((sum, value) => sum + value, 0) / Math.max(1, written.length);
  return Array.from(logs, (value) => {
    if (Number.isNaN(value)) return 0;
    const ratio = Math.exp(rules.by_sequence ? mean : value);
    const [isLow, isHigh] = [ratio < 1 - rules.low, ratio > 1 + rules.high];
    if (rules.both_signs) return isLow ? -1 : isHigh ? 1 : 0;
    if (isHigh && sample.advantage > 0) return 1;
    if (sample.advantage < 0 && rules.bound !== null && ratio > rules.bound) return 1;
    return isLow && sample.advantage < 0 ? -1 : 0;
  });
}

// Line ends stay visible where they have a colour.
function visible(token) {
  return token === "" ? "∅" : token.replace(/\n/g, "⏎\n");
}

function omission(sample) {
  return element("span", { class: "omitted" }, word("omitted", figure(sample.omitted)));
}

// A conversation's turns, one below the other: who, what, the calls in it, and why an answer is a failure.
function turnBlocks(turns) {
  return turns.map(({ role, name, content, failure, calls }) => element("div", { class: role === "assistant" ? "turn" : "turn context" },
    element("div", { class: "tag" }, [role, name].filter(Boolean).join(" · ")),
    failure ? badge(failure, "cut") : null,
    element("div", {}, content),
    calls.map((call) => element("div", { class: "call" }, element("code", {}, `→ ${call}`)))));
}

// Fills `holder` with the sample's text, each token in its colour.
function fillText(holder, sample, colour, scale, rules) {
  const tokens = tokensOf(sample);
  const head = tokens && sample.omitted ? 1500 : Infinity;
  const values = colour === "none" ? null : tokenValues(sample, colour);
  if (!values && sample.turns) {
    holder.replaceChildren(...turnBlocks(sample.turns));
    return;
  }
  if (!sample.text) {
    holder.replaceChildren(element("em", { class: "quiet" }, word("missing_text")));
    return;
  }
  if (!values) {
    const texts = head === Infinity ? [sample.text] : [tokens.slice(0, head).join(""), omission(sample), tokens.slice(head).join("")];
    holder.replaceChildren(...texts);
    return;
  }
  const clipped = colour === "log_ratio" ? clippedTokens(sample, rules) : null;
  const spans = (tokens ?? [sample.text]).map((token, index) => {
    const node = document.createElement("span");
    node.textContent = visible(token);
    node.style.backgroundColor = background(values[index], scale, colour);
    if (clipped?.[index]) node.className = "clipped";
    if (sample.turns && Number.isNaN(values[index])) node.className = "context";
    node.dataset.token = String(index);
    return node;
  });
  if (head !== Infinity) spans.splice(head, 0, omission(sample));
  holder.replaceChildren(...spans);
}

// What the pointer's token has, a line for each figure.
function tokenLines(sample, index, rules) {
  const tokens = tokensOf(sample);
  const lines = [JSON.stringify(tokens ? tokens[index] : sample.text.slice(0, 40))];
  for (const name of COLOURS) {
    const value = tokenValues(sample, name)?.[index];
    if (value === undefined || Number.isNaN(value)) continue;
    const clip = name === "log_ratio" ? clippedTokens(sample, rules)?.[index] : 0;
    const ratio = name === "log_ratio" ? `${figure(Math.exp(value))} (log ${figure(value)})` : figure(value);
    lines.push(`${word(`colour_${name}`)}: ${ratio}${clip ? `, ${word("clipped")}` : ""}`);
  }
  return lines;
}

function legend(colour, scale) {
  if (colour === "none") return null;
  const stops = SIGNED.has(colour) ? [-1, -0.25, 0, 0.25, 1] : [0, 0.1, 0.25, 0.5, 1];
  const cells = stops.map((stop) => {
    const node = element("span", { class: "swatch" }, figure(Number((stop * scale).toPrecision(2))));
    node.style.backgroundColor = background(stop * scale * (colour === "logprob" ? -1 : 1), scale, colour);
    return node;
  });
  const clip = colour === "log_ratio" ? element("span", { class: "swatch clipped" }, word("clipped")) : null;
  return element("div", { class: "legend", "aria-hidden": "true" }, cells, clip);
}
