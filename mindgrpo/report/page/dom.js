// Makes elements. Texts become text nodes: nothing a run wrote is ever read as HTML.
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function labelled(label, control) {
  return element("label", { class: "field" }, element("span", {}, label), control);
}

// `options`: [value, text] pairs.
function select(options, chosen, onChange, properties = {}) {
  const rows = options.map(([value, text]) => element("option", { value: String(value), selected: String(value) === String(chosen) }, text));
  return element("select", { ...properties, onchange: (event) => onChange(event.target.value) }, rows);
}

function checkbox(label, checked, onChange) {
  const box = element("input", { type: "checkbox", checked, onchange: (event) => onChange(event.target.checked) });
  return element("label", { class: "check" }, box, element("span", {}, label));
}

function title(section) {
  return element("h2", { id: `${section}-title` }, word(section));
}

function table(heads, rows, properties = {}) {
  const head = element("thead", {}, element("tr", {}, heads.map((text) => element("th", { scope: "col" }, text))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": properties.label },
    element("table", {}, head, element("tbody", {}, rows)));
}

function say(text) {
  byId("status").textContent = text;
}

// At most four digits that matter, without an exponent where it reads well without.
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(size < 1 ? 3 : 4)));
}

function signed(value) {
  return value > 0 ? `+${figure(value)}` : figure(value).replace("-", "−");
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.round(seconds % 60)];
  return h ? `${h} h ${m} min` : `${m} min ${s} s`;
}

function moment(seconds) {
  const locale = language === "zh" ? "zh-CN" : "en-GB";
  return new Date(seconds * 1000).toLocaleString(locale, { dateStyle: "medium", timeStyle: "short" });
}
