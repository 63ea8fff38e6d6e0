// All runs, and one run: what needs a person first, then the numbers.

import { address, get, many, parameters, remember } from "./api.js";
import { chart, colour, families, isShare, sparkline } from "./charts.js";
import { ago, clear, h, number, percent, plain, points, signed, toast } from "./dom.js";
import { go } from "./app.js";

export function findingList(findings, run) {
  return h("div", { class: "findings", role: "list" }, findings.map((one) => h("article", { class: `finding ${one.severity} ${one.kind}`, role: "listitem" },
    h("h3", {}, run && h("a", { class: "link", href: `/run/${encodeURIComponent(run)}` }, `${plain(run)} · `), plain(one.title)),
    h("p", {}, plain(one.detail)),
    one.query && h("a", { class: "button go", href: address("/episodes", one.query) }, "Show episodes"))));
}

const isRatio = (name) => name && /success|pass@|average@|kept/.test(name);
const shown = (name, value) => (isRatio(name) ? percent(value) : number(value));

// The end of a long name says which; of a checkpoint, with its run.
const modelName = (name) => plain(name.split("/").slice(name.includes("/checkpoints/") ? -3 : -2).join("/"));

// How far a metric has come, in words and as a class: good is up, of a loss down, and what rounds to nothing is neither.
function changed(name, change) {
  const found = isRatio(name) ? points(change, 0) : signed(change);
  return { ...found, tone: found.sign === 0 ? "faint" : `reward ${found.sign > 0 === !/loss$/.test(name) ? "good" : "bad"}` };
}

export async function runsPage(context) {
  context.title("Runs");
  const chosen = new Set();
  const draw = async () => {
    const found = await get("/api/runs");
    if (context.isOver()) return;
    const urgent = found.runs.flatMap((run) => run.findings.filter((one) => one.severity === "error").map((one) => [run, one]));
    const live = found.runs.filter((run) => run.live).length;
    const problems = found.index.problems;
    clear(context.frame,
      h("div", { class: "spread" }, h("h1", {}, "Runs"), h("span", { class: "soft" }, `${found.runs.length} run${found.runs.length === 1 ? "" : "s"}${live ? `, ${live} training now` : ""}`)),
      found.runs.length === 0 && h("div", { class: "panel empty" }, h("h2", {}, "No runs here yet"), h("p", {}, `${found.root} holds no runs. `, h("code", {}, "ludus train recipe.toml"), " makes one; this page will show it.")),
      urgent.length > 0 && h("section", { class: "stack", "aria-labelledby": "needs" }, h("h2", { id: "needs" }, "What needs a person"), h("div", { class: "findings" }, urgent.slice(0, 4).map(([run, one]) => findingList([one], run.name))), urgent.length > 4 && h("details", {}, h("summary", { class: "soft" }, `${urgent.length - 4} more`), h("div", { class: "findings", style: { "margin-top": "10px" } }, urgent.slice(4, 40).map(([run, one]) => findingList([one], run.name))))),
      found.runs.length > 0 && urgent.length === 0 && h("div", { class: "panel all-well" }, "✓", "Nothing needs a person right now."),
      found.runs.length > 0 && h("section", { class: "stack", "aria-labelledby": "all" },
        h("div", { class: "spread" }, h("h2", { id: "all" }, "All runs"), compareButton(chosen)),
        h("div", { class: "run-list" }, found.runs.map((run) => card(run, chosen, found.runs.filter((one) => one.recipe_key && one.recipe_key === run.recipe_key))))),
      found.index.waiting > 0 && h("p", { class: "soft small" }, `Reading episodes: ${found.index.waiting} of ${found.index.files} files to go.`),
      problems.length > 0 && h("details", { class: "panel" }, h("summary", {}, `${problems.length} file${problems.length > 1 ? "s" : ""} of episodes cannot be read`), h("ul", { class: "small soft" }, problems.map((one) => h("li", {}, h("b", {}, `${plain(one.run)}/${plain(one.file)}: `), plain(one.problem))))));
  };
  await draw();
  context.every(4, async () => { if (!context.frame.contains(document.activeElement) || document.activeElement === document.body) await draw(); });
}

function compareButton(chosen) {
  const made = h("button", { class: "button", type: "button", disabled: chosen.size < 2, id: "compare-runs", onclick: () => {
    const [first, ...others] = [...chosen];
    go(address(`/run/${encodeURIComponent(first)}`, { with: others }));
  } }, chosen.size < 2 ? "Choose two to compare" : `Compare ${chosen.size} runs`);
  return made;
}

function card(run, chosen, seeds) {
  const change = run.spark.length > 1 ? changed(run.headline, run.last - run.first) : null;
  const worst = run.findings.filter((one) => one.severity !== "note").length;
  return h("article", { class: "run-card" },
    h("input", { type: "checkbox", "aria-label": `Choose ${plain(run.name)} to compare`, checked: chosen.has(run.name), onchange: (event) => {
      if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
      document.getElementById("compare-runs")?.replaceWith(compareButton(chosen));
    } }),
    h("div", {},
      h("h2", {}, h("a", { class: "link", href: `/run/${encodeURIComponent(run.name)}` }, plain(run.name))),
      h("div", { class: "row small soft" },
        run.live ? h("span", { class: "chip good" }, h("span", { class: "live-dot" }), "training") : h("span", { class: "faint" }, ago(run.updated)),
        run.kind !== "run" && h("span", { class: "chip accent" }, run.kind), run.algorithm && h("span", { class: "chip" }, plain(run.algorithm)),
        seeds.length > 1 && h("a", { class: "chip accent", href: address(`/run/${encodeURIComponent(run.name)}`, { with: seeds.map((one) => one.name).filter((one) => one !== run.name).sort() }), title: "Mean and band of the runs of this recipe" }, `${seeds.length} seeds`), run.model && h("span", { class: "faint" }, modelName(run.model)),
        worst > 0 && h("span", { class: "chip bad" }, `${worst} to look at`), run.problem && h("span", { class: "chip warn" }, plain(run.problem)))),
    h("div", { class: "number" }, h("span", { class: "small faint" }, run.headline || "no metrics"), h("b", {}, shown(run.headline, run.last)),
      change && h("span", { class: `small ${change.tone}` }, change.text)),
    h("div", { class: "wide" }, run.kind === "run" && sparkline(run.spark, run.stages)),
    h("div", { class: "right small soft hide-small", style: { "min-width": "110px" } }, run.kind === "run" && `step ${run.steps}${run.planned ? ` of ${run.planned}` : ""}`, run.planned > 0 && h("progress", { max: run.planned, value: Math.min(run.steps, run.planned), "aria-label": "steps done" })));
}

export async function runPage(context) {
  const [name] = context.parts;
  context.title(name);
  const others = many(context.query.with);
  const state = { tab: context.query.tab || "curves", smooth: Number(context.query.smooth ?? 0.6), first: context.query.first || null, last: context.query.last || null, search: context.query.metric || "", apart: context.query.apart === "1" };
  let detail = await get(`/api/run/${encodeURIComponent(name)}`);
  const all = (await get("/api/runs")).runs.filter((one) => one.name !== name);
  const head = h("div", { class: "stack" }), body = h("div", { class: "stack" });
  clear(context.frame, head, body);
  const urgent = () => detail.findings.filter((one) => one.severity !== "note");
  const drawHead = () => clear(head,
    h("div", { class: "spread" },
      h("div", {}, h("h1", {}, plain(name)), h("div", { class: "row soft", style: { "margin-top": "8px" } },
        detail.live ? h("span", { class: "chip good" }, h("span", { class: "live-dot" }), "training now") : h("span", { class: "chip" }, `written ${ago(detail.updated)}`),
        detail.algorithm && h("span", { class: "chip" }, plain(detail.algorithm)), detail.model && h("span", { class: "chip", title: detail.model }, modelName(detail.model)), detail.kind === "run" && h("span", { class: "small" }, `step ${detail.steps}${detail.planned ? ` of ${detail.planned}` : ""}`), detail.problem && h("span", { class: "chip warn" }, plain(detail.problem)))),
      h("a", { class: "button primary", href: address("/episodes", { run: name }) }, `${number(detail.episodes)} episodes →`)),
    urgent().length ? h("section", { class: "stack", "aria-label": "What needs a person" }, h("h2", {}, "What needs a person"), findingList(urgent())) : h("div", { class: "all-well" }, "✓ Nothing needs a person."),
    urgent().length < detail.findings.length && findingList(detail.findings.filter((one) => one.severity === "note")),
    h("div", { class: "tabs", role: "tablist" }, [["curves", "Curves"], ["recipe", others.length ? "Recipe differences" : "Recipe"]].map(([key, title]) => h("button", { role: "tab", type: "button", "aria-selected": state.tab === key ? "true" : "false", onclick: () => { state.tab = key; remember({ tab: key }); drawHead(); draw(); } }, title))));
  const draw = async () => (state.tab === "recipe" ? recipe(body, name, others, detail) : curves(body, name, others, all, detail, state, draw, context));
  drawHead();
  await draw();
  context.every(3, async () => {
    const now = await get(`/api/run/${encodeURIComponent(name)}`);
    if (context.isOver() || (now.steps === detail.steps && now.updated === detail.updated && now.episodes === detail.episodes && now.live === detail.live)) return;
    detail = now;
    drawHead();
    if (state.tab === "curves" && !body.matches(":hover")) await draw();
  });
}

async function curves(body, name, others, all, detail, state, redraw, context) {
  const names = detail.sections.flatMap((one) => one.names);
  if (!names.length) { clear(body, h("div", { class: "panel empty" }, h("h2", {}, "Nothing was logged yet"), h("p", {}, "Curves appear with the first step."))); return; }
  const runs = [name, ...others];
  const found = { lines: [], definitions: {} };
  for (let start = 0; start < names.length; start += 60) {
    const part = await get("/api/series", { run: runs, name: names.slice(start, start + 60), first: state.first, last: state.last, apart: state.apart ? 1 : null });
    for (const line of part.lines) {
      const own = found.lines.find((one) => one.name === line.name);
      if (own) Object.assign(own.series, line.series); else found.lines.push(line);
    }
    Object.assign(found.definitions, part.definitions);
  }
  const several = found.lines.length > 1;
  const seeds = all.filter((one) => one.recipe_key && one.recipe_key === detail.recipe_key).map((one) => one.name).sort();
  if (context.isOver() || state.tab !== "curves") return; // another tab was chosen meanwhile
  const zoom = (first, last) => { state.first = first; state.last = last; remember({ first, last }); redraw(); };
  const make = (title, members, large) => {
    const lines = found.lines.flatMap((line, r) => members.map((metric, m) => ({
      ...line.series[metric], run: line.name, metric, name: several ? `${line.name} ${members.length > 1 ? metric : ""}` : metric,
      colour: colour(several ? r : m), dash: several ? m % 4 : 0,
    }))).filter((line) => line.values.length);
    const definition = found.definitions[members[0]];
    return chart(lines, { title, definition, stages: detail.stages, smooth: state.smooth, share: members.every((one) => isShare(found.definitions[one])), height: large ? 260 : 190, onzoom: zoom });
  };
  const wanted = (title, members) => !state.search || [title, ...members].some((one) => one.toLowerCase().includes(state.search.toLowerCase()));
  const has = (one) => names.includes(one);
  const key = [["Success", ["success", "eval/success"].filter(has)], ["Reward", ["reward", "eval/reward"].filter(has)], ["Loss", ["loss", "sft/loss", "dpo/loss"].filter(has)]].filter(([, members]) => members.length).slice(0, 2);
  const sections = detail.sections.map((one) => [one.title, [...families(one.names)].filter(([title, members]) => wanted(title, members) && (state.search || !key.some(([, shown]) => members.every((one) => shown.includes(one)))))]).filter(([, list]) => list.length);
  clear(body,
    h("div", { class: "row" },
      h("label", { class: "range" }, "Smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, onchange: (event) => { state.smooth = Number(event.target.value); remember({ smooth: state.smooth }); redraw(); } }), h("output", {}, state.smooth.toFixed(2))),
      h("input", { class: "input", style: { width: "220px" }, type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", value: state.search, onchange: (event) => { state.search = event.target.value; remember({ metric: state.search }); redraw(); } }),
      h("select", { class: "input", style: { width: "220px" }, "aria-label": "Lay another run over this one", onchange: (event) => event.target.value && go(address(location.pathname, { ...parameters(), with: [...others, event.target.value] })) },
        h("option", { value: "" }, "Overlay a run…"), all.map((one) => one.name).filter((one) => !others.includes(one)).map((one) => h("option", { value: one }, plain(one)))),
      seeds.some((one) => !others.includes(one)) && h("a", { class: "button", href: address(location.pathname, { ...parameters(), with: [...new Set([...others, ...seeds])] }) }, `Overlay its ${seeds.length + 1} seeds`),
      others.map((one) => h("button", { class: "chip accent", type: "button", title: "Take it away", onclick: () => go(address(location.pathname, { ...parameters(), with: others.filter((other) => other !== one) })) }, `${plain(one)} ✕`)),
      (state.apart || found.lines.length < runs.length) && h("button", { class: "button", type: "button", "aria-pressed": state.apart ? "true" : "false", title: "Seeds of one recipe are one line: their mean, in a band from the lowest to the highest", onclick: () => { state.apart = !state.apart; remember({ apart: state.apart ? 1 : null }); redraw(); } }, "Seeds apart"),
      (state.first || state.last) && h("button", { class: "button", type: "button", onclick: () => zoom(null, null) }, `Steps ${state.first ?? ""}–${state.last ?? ""} ✕`),
      others.length > 0 && h("a", { class: "button", href: address("/compare", { a_run: name, b_run: others[0] }) }, "Paired statistics"),
      h("button", { class: "button", type: "button", onclick: async () => { await navigator.clipboard?.writeText(location.href); toast("The address of this view was copied"); } }, "Copy link")),
    !state.search && key.length > 0 && h("div", { class: "charts large" }, key.map(([title, members]) => make(title, members, true))),
    sections.map(([title, list]) => h("section", { class: "stack", style: { gap: "12px" } }, h("h2", {}, title), h("div", { class: "charts" }, list.map(([one, members]) => make(one, members, false))))),
    state.search && sections.length === 0 && h("p", { class: "empty" }, "No metric has that name."));
}

async function recipe(body, name, others, detail) {
  if (others.length) {
    const found = await get("/api/diff", { run: [name, ...others] });
    clear(body, found.settings.length === 0 ? h("div", { class: "panel empty" }, h("h2", {}, "The recipes are the same")) : h("div", { class: "table-wrap" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "Setting"), found.runs.map((run) => h("th", {}, plain(run))))),
      h("tbody", {}, found.settings.map((one) => h("tr", {}, h("td", { class: "mono" }, plain(one.name)), found.runs.map((run) => h("td", { class: "mono" }, plain(JSON.stringify(one.values[run]))))))))));
    return;
  }
  clear(body, h("pre", { class: "panel said" }, plainJson(detail.recipe)));
}

const plainJson = (value) => JSON.stringify(value, (key, one) => (one === null || (Array.isArray(one) && !one.length) ? undefined : one), 2);
