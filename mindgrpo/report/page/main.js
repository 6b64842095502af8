// Puts the page together, and listens to keys, the size of the window and the colours of the system.
function renderNavigation() {
  const names = ["overview", "curves", "samples", "heldout", "phases", "configuration"];
  byId("sections").replaceChildren(...names.map((name) => element("a", { href: `#${name}` }, word(name))));
  const button = byId("language");
  button.textContent = word("language");
  button.lang = language === "zh" ? "en" : "zh";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  document.querySelectorAll("[data-word]").forEach((node) => { node.textContent = word(node.dataset.word); });
  document.querySelectorAll("[data-label]").forEach((node) => { node.setAttribute("aria-label", word(node.dataset.label)); });
}

function render() {
  renderNavigation();
  renderHeader();
  renderCurves();
  renderSamples();
  renderHeldOut();
  renderPhases();
  renderConfiguration();
}

const isField = (node) => Boolean(node.closest?.("input, select, textarea"));
const scrolls = (node) => node.scrollWidth > node.clientWidth + 1 && node.tabIndex === 0;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isField(event.target)) event.target.blur();
  if (isField(event.target)) return;
  if (event.key === "/" && byId("search")) {
    event.preventDefault();
    byId("search").focus();
  }
  const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (offset && !scrolls(event.target)) {
    event.preventDefault();
    moveStep(offset);
  }
});
document.addEventListener("pointerover", showTip);
document.addEventListener("scroll", () => { byId("tip").hidden = true; }, { passive: true });
byId("language").addEventListener("click", () => {
  language = language === "zh" ? "en" : "zh";
  render();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderCurves);
new ResizeObserver(resizeCurves).observe(byId("main"));
render();
document.documentElement.dataset.ready = "true";
