// Groups of a step side by side, their samples as cards; one whose prompt is not the group's first shows its own.
let seen = null;

function spread(samples) {
  const totals = samples.map((sample) => sample.total).filter((total) => total !== null);
  if (!totals.length) return ["–", "–"];
  const mean = totals.reduce((sum, total) => sum + total, 0) / totals.length;
  const variance = totals.reduce((sum, total) => sum + (total - mean) ** 2, 0) / totals.length;
  return [figure(mean), figure(Math.sqrt(variance))];
}

function badge(text, kind = "", label = "") {
  return element("span", { class: `badge ${kind}`, title: label }, text);
}

function badges(sample) {
  const sign = sample.advantage > 0 ? "up" : sample.advantage < 0 ? "down" : "";
  return element("div", { class: "badges" },
    badge(figure(sample.total), "reward", word("reward")),
    sample.advantage === null ? null : badge(`A ${signed(sample.advantage)}`, sign, word("advantage")),
    badge(word("tokens", figure(sample.length)), "", word("sort_length")),
    sample.turns ? badge(word("turns", sample.turns.filter(({ role }) => role === "assistant").length)) : null,
    sample.finish ? badge(sample.finish, sample.finish === "length" ? "cut" : "", word("finish")) : null);
}

function functionLine(rewards) {
  const names = Object.keys(rewards);
  if (!names.length) return null;
  return element("div", { class: "functions quiet" }, names.map((name) => element("span", {}, `${name} ${figure(rewards[name])}`)));
}

function sampleCard(sample, fill) {
  const text = element("div", { class: "text", tabindex: "0", role: "group", "aria-label": word("sample", sample.number) });
  const card = element("article", { class: "sample" });
  const enlarge = element("button", { type: "button", class: "small", title: word("expand"), "aria-label": word("expand"),
    "aria-expanded": "false", onclick: () => enlarge.setAttribute("aria-expanded", String(card.classList.toggle("large"))) }, "⤢");
  card.append(element("div", { class: "card-head" }, element("span", { class: "quiet" }, `#${sample.number}`), badges(sample), enlarge),
    ...[functionLine(sample.rewards), sample.prompt ? promptRow(sample.prompt) : null].filter(Boolean), text);
  // A card's tokens become elements when it comes into sight: a step may have a million of them.
  text.fill = () => fill(text, sample);
  text.sample = sample;
  seen.observe(text);
  return card;
}

function promptRow(prompt, answer = "", images = []) {
  return element("div", { class: "prompt" },
    element("span", { class: "tag" }, word("prompt")),
    images.map((src, i) => element("img", { src, alt: word("image", i + 1) })),
    element("pre", { tabindex: "0" }, prompt),
    answer ? [element("span", { class: "tag" }, word("answer")), element("code", {}, answer)] : []);
}

function groupArticle(group, samples, number, fill) {
  const [mean, deviation] = spread(group.samples);
  return element("article", { class: "group" },
    element("header", { class: "group-head" },
      element("h3", {}, word("group", number)), element("span", { class: "quiet" }, word("mean_spread", mean, deviation))),
    promptRow(group.prompt, group.answer, group.images),
    element("div", { class: "cards" }, samples.map((sample) => sampleCard(sample, fill))));
}

function lazily(entries) {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    entry.target.fill();
  }
}

// The groups in the order of their best sample, by what samples are sorted by.
function orderedGroups(data) {
  const groups = data.groups.map((group, i) => ({ group, number: i + 1,
    samples: sorted(group.samples.filter((sample) => matches(sample, sample.prompt ?? group.prompt))) }));
  const kept = groups.filter(({ samples }) => samples.length);
  if (state.sort === "order") return kept;
  const rank = new Map(sorted(kept.map(({ samples }) => samples[0])).map((sample, i) => [sample, i]));
  return kept.sort((a, b) => rank.get(a.samples[0]) - rank.get(b.samples[0]));
}

function renderGroups() {
  const run = RUNS[state.run];
  const data = stepData(state.run, shownStep());
  const colour = sharedColour(run);
  const scale = colour === "none" ? 1 : scaleOf(data, colour);
  seen?.disconnect();
  seen = new IntersectionObserver(lazily, { rootMargin: "600px" });
  const fill = (holder, sample) => fillText(holder, sample, colour, scale, run.clipping);
  const ordered = orderedGroups(data);
  const count = ordered.reduce((sum, { samples }) => sum + samples.length, 0);
  const shown = [word("matching", count, sampleTotals(data).length)];
  if (data.groups.length < data.num_groups) shown.push(word("groups_shown", data.groups.length, data.num_groups));
  byId("groups").replaceChildren(
    element("div", { class: "row wide" }, element("p", { id: "matching", class: "quiet" }, shown.join(" · ")), legend(colour, scale)),
    ...(ordered.length
      ? ordered.map(({ group, samples, number }) => groupArticle(group, samples, number, fill))
      : [element("p", {}, word("no_match"))]));
}

function showTip(event) {
  const tip = byId("tip");
  const token = event.target.closest?.("[data-token]");
  const holder = token?.closest(".text");
  if (!holder) {
    tip.hidden = true;
    return;
  }
  const lines = tokenLines(holder.sample, Number(token.dataset.token), RUNS[state.run].clipping);
  tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = token.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}
