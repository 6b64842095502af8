// Answers to held-out prompts, a column for each evaluation, and what changed between the first and the last one.
const ANSWER_ROWS = 20;

function columnName({ run, step }) {
  const name = step === 0 ? word("before") : word("after_step", step);
  return RUNS.length > 1 ? `${"AB"[run]} · ${name}` : name;
}

function answersShown() {
  const { show, search } = state.answers;
  const needle = search.toLowerCase();
  const kinds = {
    all: () => true,
    changed: ({ change }) => change !== null && change !== 0,
    better: ({ change }) => change > 0,
    worse: ({ change }) => change < 0,
    same: ({ change }) => change === 0,
  };
  return DATA.heldOut.rows.filter((row) => kinds[show](row) && (!needle
    || [row.prompt, ...row.cells.map((cell) => cell?.text ?? "")].some((text) => text.toLowerCase().includes(needle))))
    .sort((a, b) => Math.abs(b.change ?? 0) - Math.abs(a.change ?? 0));
}

function answerCell(cell, column) {
  if (!cell) return element("div", { class: "sample" }, element("div", { class: "quiet" }, `${columnName(column)}: ${word("no_answer")}`));
  return element("div", { class: "sample" },
    element("div", { class: "card-head" }, element("span", { class: "quiet" }, columnName(column)),
      element("div", { class: "badges" }, badge(figure(cell.total), "reward", word("reward")),
        cell.finish ? badge(cell.finish, cell.finish === "length" ? "cut" : "", word("finish")) : null)),
    functionLine(cell.rewards),
    element("div", { class: "text", tabindex: "0" }, cell.turns ? turnBlocks(cell.turns) : cell.text || word("missing_text")));
}

function answerRow(row) {
  const kind = row.change > 0 ? "up" : row.change < 0 ? "down" : "";
  const cells = element("div", { class: "cards answers" }, row.cells.map((cell, i) => answerCell(cell, DATA.heldOut.columns[i])));
  return element("article", { class: "group" },
    element("div", { class: "prompt" }, row.change === null ? null : badge(`${word("change")} ${signed(row.change)}`, kind),
      element("pre", { tabindex: "0" }, row.prompt),
      row.answer ? [element("span", { class: "tag" }, word("answer")), element("code", {}, row.answer)] : []),
    cells);
}

// Means and their errors by evaluation, of every function.
function meansTable() {
  const columns = RUNS.flatMap((run, index) => {
    const measured = run.figures.steps.filter((_, row) => evaluated(run, row));
    return [...new Set([measured[0], measured[measured.length - 1]])].filter((step) => step !== undefined)
      .map((step) => ({ run: index, step }));
  });
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.figures.columns)))].filter((key) => /^eval.*\/(mean|pass@([2-9]|\d\d+))$/.test(key));
  if (!columns.length || !keys.length) return null;
  const cell = ({ run, step }, key) => {
    const { steps, columns: by } = RUNS[run].figures;
    const at = (name) => by[name]?.[steps.indexOf(step)] ?? null;
    const error = at(key.replace(/mean$/, "stderr"));
    return figure(at(key)) + (key.endsWith("/mean") && error !== null ? ` ± ${figure(error)}` : "");
  };
  const rows = keys.map((key) => element("tr", {}, element("th", { scope: "row" }, key),
    columns.map((column) => element("td", { class: "number" }, cell(column, key)))));
  return table([word("function"), ...columns.map(columnName)], rows, { label: word("heldout") });
}

function evaluated(run, row) {
  return Object.entries(run.figures.columns).some(([key, column]) => /^eval.*\/mean$/.test(key) && column[row] !== null);
}

function renderAnswers() {
  const rows = answersShown();
  const { limit } = state.answers;
  const left = rows.length - limit;
  const more = left > 0 ? element("button", { type: "button", onclick: () => {
    state.answers.limit += ANSWER_ROWS;
    renderAnswers();
  } }, word("more", Math.min(left, ANSWER_ROWS))) : null;
  byId("answers").replaceChildren(
    element("p", { class: "quiet" }, word("answers_shown", rows.length, DATA.heldOut.rows.length)),
    ...rows.slice(0, limit).map(answerRow), ...(more ? [more] : []));
}

function renderHeldOut() {
  const { rows, num_rows: numRows } = DATA.heldOut;
  const means = meansTable();
  const parts = [title("heldout"), means];
  if (rows.length) {
    const shows = ["all", "changed", "better", "worse", "same"].map((name) => [name, word(name)]);
    const change = (key, value) => { state.answers[key] = value; state.answers.limit = ANSWER_ROWS; renderAnswers(); };
    parts.push(
      rows.length < numRows ? element("p", { class: "quiet" }, word("showing_rows", rows.length, numRows)) : null,
      element("div", { class: "tools" },
        labelled(word("show"), select(shows, state.answers.show, (value) => change("show", value), { name: "show-answers" })),
        labelled(word("search"), element("input", { type: "search", value: state.answers.search, oninput: (event) => change("search", event.target.value) }))),
      element("div", { id: "answers" }));
  } else if (!means) {
    parts.push(element("p", { class: "quiet" }, word("nothing")));
  }
  byId("heldout").replaceChildren(...parts.filter(Boolean));
  if (rows.length) renderAnswers();
}
