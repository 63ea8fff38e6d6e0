// All episodes: search, filters, sorting, pages; every state is an address.

import { address, episodeUrl, get, many, parameters, remember } from "./api.js";
import { announce, clear, duration, h, number, percent, plain, rewardClass } from "./dom.js";
import { go } from "./app.js";

const PAGE = 50;
const COLUMNS = [["task", "Task", ""], ["step", "Step", "number"], ["reward", "Reward", "number"], ["advantage", "Advantage", "number hide-small"], ["turns", "Turns", "number hide-small"], ["tokens", "Tokens", "number hide-small"], ["seconds", "Time", "number hide-small"]];

export async function episodesPage(context) {
  context.title("Episodes");
  const state = { ...context.query };
  const focusSearch = state.focus === "search";
  delete state.focus;
  if (focusSearch) remember({ focus: null });
  let rows = [], selected = 0, version = null;
  const results = h("div", { class: "stack", "aria-busy": "true" });
  const search = h("input", { id: "search", class: "input search-input", type: "search", placeholder: "Search what was said, called and answered   ( / )", "aria-label": "Search the text of episodes", value: state.text || "" });
  const fields = h("div", { class: "filters" });
  clear(context.frame, h("div", { class: "spread" }, h("h1", {}, "Episodes"), h("span", { id: "count", class: "soft", "aria-live": "polite" })), search, fields, results);
  const change = (changes) => { Object.assign(state, changes, { offset: null }); remember(clean(state), true); selected = 0; load(); drawFields(); };
  const clean = (from) => { const all = {}; for (const name of Object.keys(parameters())) all[name] = null; return { ...all, ...from }; };
  let timer = null;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => change({ text: search.value }), 220); });
  search.addEventListener("keydown", (event) => { if (event.key === "Escape" || event.key === "Enter") search.blur(); });

  let facets = {};
  const select = (name, title, options) => h("label", { class: "field" }, title, h("select", { onchange: (event) => change({ [name]: event.target.value }) }, h("option", { value: "" }, "any"), options.map(([value, text]) => h("option", { value, selected: String(state[name] ?? "") === String(value) }, text))));
  const counted = (list) => (list || []).map((one) => [one.value, `${plain(one.value)} (${number(one.episodes)})`]);
  const withAny = (name, list) => [...(list?.length ? [["any", "any kind"]] : []), ...counted(list)];
  const input = (name, hint, type = "text") => h("input", { type, step: "any", placeholder: hint, "aria-label": hint, value: state[name] ?? "", onchange: (event) => change({ [name]: event.target.value }) });
  const ACTIVE = ["run", "first_step", "last_step", "split", "task", "least_reward", "most_reward", "success", "stop", "failure", "tool", "fault", "faulted", "answer", "group", "file"];
  const drawFields = () => {
    const active = ACTIVE.filter((name) => state[name] !== undefined && state[name] !== null && state[name] !== "");
    clear(fields, h("div", { class: "fields" },
      select("run", "Run", facets.runs || []),
      h("label", { class: "field" }, "Task", input("task", "id or pattern*")),
      h("div", { class: "field" }, "Steps", h("div", { class: "pair" }, input("first_step", String(facets.first_step ?? "from"), "number"), input("last_step", String(facets.last_step ?? "to"), "number"))),
      h("div", { class: "field" }, "Reward", h("div", { class: "pair" }, input("least_reward", facets.least_reward == null ? "from" : number(facets.least_reward, 2), "number"), input("most_reward", facets.most_reward == null ? "to" : number(facets.most_reward, 2), "number"))),
      select("success", "Success", [["yes", "succeeded"], ["no", "did not"]]),
      select("stop", "How it ended", counted(facets.stop)),
      select("failure", "Lost at", withAny("failure", facets.failure)),
      select("tool", "Calls the tool", counted(facets.tool)),
      select("fault", "Fault", withAny("fault", facets.fault)),
      select("split", "Split", counted(facets.split))),
    active.length > 0 && h("div", { class: "row" }, active.map((name) => h("button", { class: "chip accent", type: "button", title: "Take this filter away", onclick: () => change({ [name]: null }) }, `${name.replaceAll("_", " ")}: ${plain(many(state[name]).join(", "))} ✕`)), h("button", { class: "button", type: "button", onclick: () => { for (const name of [...ACTIVE, "text"]) state[name] = null; search.value = ""; change({}); } }, "Clear all")));
  };
  const loadFacets = async () => {
    const [found, runs] = await Promise.all([get("/api/facets", { run: state.run }), get("/api/runs")]);
    facets = { ...found, runs: runs.runs.map((one) => [one.name, plain(one.name)]) };
    if (!context.isOver() && !fields.contains(document.activeElement)) drawFields();
  };

  let turn = 0;
  const load = async () => {
    const own = (turn += 1);
    results.setAttribute("aria-busy", "true");
    let found;
    try { found = await get("/api/episodes", { ...state, limit: PAGE }); }
    catch (error) { if (own === turn) clear(results, h("div", { class: "error-box", role: "alert" }, error.message)); return; }
    if (own !== turn || context.isOver()) return;
    rows = found.episodes;
    version = found.index.version;
    results.setAttribute("aria-busy", "false");
    draw(found);
  };
  const draw = (found) => {
    const total = found.summary.episodes, first = found.offset + 1, last = found.offset + rows.length;
    document.getElementById("count").textContent = `${number(total)} episode${total === 1 ? "" : "s"}`;
    announce(`${total} episodes`);
    const sort = state.sort || "step", ascending = state.order === "asc";
    const page = (offset) => { state.offset = offset; remember(clean(state), true); selected = 0; load(); window.scrollTo(0, 0); };
    clear(results,
      total > 0 && h("div", { class: "row", style: { gap: "38px" } }, [["Reward", number(found.summary.reward)], ["Success", percent(found.summary.success)], ["Tasks", number(found.summary.tasks)], ["Turns", number(found.summary.turns, 1)], ["Lost", number(found.summary.lost)]].map(([label, value]) => h("div", { class: "stat" }, h("span", { class: "label" }, label), h("span", { class: "value" }, value)))),
      found.index.waiting > 0 && h("p", { class: "soft small", role: "status" }, `Still reading: ${found.index.waiting} of ${found.index.files} files to go.`),
      rows.length === 0 ? h("div", { class: "panel empty" }, h("h2", {}, "No episode fits"), h("p", {}, total === 0 && !Object.keys(state).some((name) => state[name]) ? "No episodes have been recorded yet (run.trajectories_every)." : "Take a filter away, or search for something else.")) :
      h("div", { class: "table-wrap" }, h("table", {},
        h("thead", {}, h("tr", {}, COLUMNS.map(([key, title, kind]) => h("th", { class: kind, "aria-sort": sort === key ? (ascending ? "ascending" : "descending") : null }, h("button", { type: "button", onclick: () => change({ sort: key, order: sort === key && !ascending ? "asc" : null }) }, `${title}${sort === key ? (ascending ? " ↑" : " ↓") : ""}`))), h("th", {}, "How it went"))),
        h("tbody", {}, rows.map((row, place) => line(row, place === selected, state))))),
      total > PAGE && h("nav", { class: "pager", "aria-label": "Page of the list" }, h("span", { class: "soft" }, `${number(first)}–${number(last)} of ${number(total)}`), h("button", { class: "button", type: "button", disabled: found.offset === 0, onclick: () => page(Math.max(0, found.offset - PAGE)) }, "← Previous"), h("button", { class: "button", type: "button", disabled: last >= total, onclick: () => page(found.offset + PAGE) }, "Next →")));
  };
  const mark = (place) => {
    selected = Math.max(0, Math.min(rows.length - 1, place));
    results.querySelectorAll("tr.item").forEach((one, n) => { one.setAttribute("aria-selected", n === selected ? "true" : "false"); if (n === selected) one.scrollIntoView({ block: "nearest" }); });
  };
  context.onKey((event) => {
    if (event.key === "j" || event.key === "ArrowDown") { event.preventDefault(); mark(selected + 1); }
    else if (event.key === "k" || event.key === "ArrowUp") { event.preventDefault(); mark(selected - 1); }
    else if (event.key === "Enter" && rows[selected] && event.target.tagName !== "BUTTON" && event.target.tagName !== "A") go(episodeUrl(rows[selected], { from: location.search.slice(1) }));
  });
  drawFields();
  await Promise.all([load(), loadFacets()]);
  if (focusSearch) search.focus();
  context.every(3, async () => {
    const now = (await get("/api/episodes", { ...state, limit: 1, offset: 0 })).index.version;
    if (now !== version) { await load(); await loadFacets(); }
  });
}

function line(row, isSelected, state) {
  const faults = [...new Set(row.faults || [])];
  return h("tr", { class: "item", tabindex: 0, "aria-selected": isSelected ? "true" : "false", onclick: (event) => { if (!event.target.closest("a")) go(episodeUrl(row, { from: location.search.slice(1) })); }, onkeydown: (event) => { if (event.key === "Enter" && event.target === event.currentTarget) { event.stopPropagation(); go(episodeUrl(row, { from: location.search.slice(1) })); } } },
    h("td", {}, h("a", { class: "task", href: episodeUrl(row, { from: location.search.slice(1) }) }, plain(row.task || "(no id)")), h("span", { class: "faint small" }, ` · attempt ${row.attempt}${many(state.run).length === 1 ? "" : ` · ${plain(row.run)}`}`),
      h("div", { class: "sub" }, row.found ? marked(plain(row.found), state.text) : plain(row.answer || row.opening || ""))),
    h("td", { class: "number" }, number(row.step)),
    h("td", { class: `number ${rewardClass(row.reward, row.success)}` }, row.reward === null ? "lost" : number(row.reward)),
    h("td", { class: "number hide-small" }, row.advantage === null ? "–" : `${row.advantage > 0 ? "+" : ""}${number(row.advantage, 2)}`),
    h("td", { class: "number hide-small" }, number(row.turns)), h("td", { class: "number hide-small" }, number(row.action_tokens)), h("td", { class: "number hide-small" }, duration(row.seconds)),
    h("td", {}, h("span", { class: "row", style: { gap: "5px" } }, h("span", { class: `chip ${row.failure ? "bad" : row.stop === "max_turns" || row.stop === "max_tokens" ? "warn" : ""}` }, row.failure ? `lost: ${plain(row.failure)}` : plain(row.stop)), faults.slice(0, 2).map((one) => h("span", { class: "chip bad" }, plain(one))), (row.tools || []).slice(0, 3).map((one) => h("span", { class: "chip" }, plain(one))), row.split !== "train" && h("span", { class: "chip accent" }, plain(row.split)))));
}

function marked(text, needle) {
  const place = needle ? text.toLowerCase().indexOf(needle.toLowerCase()) : -1;
  if (place < 0) return text;
  return ["…", text.slice(0, place), h("mark", {}, text.slice(place, place + needle.length)), text.slice(place + needle.length), "…"];
}

export { address };
