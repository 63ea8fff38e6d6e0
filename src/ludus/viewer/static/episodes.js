// All episodes: search, filters, sorting, pages; every state is an address.

import { address, episodeUrl, get, many, parameters, place, remember } from "./api.js";
import { add, announce, clear, duration, h, number, percent, plain, rewardClass } from "./dom.js";
import { go } from "./app.js";

const PAGE = 50;
const COLUMNS = [["task", "Task", ""], ["step", "Step", "number"], ["reward", "Reward", "number"], ["advantage", "Advantage", "number hide-small"], ["turns", "Turns", "number hide-small"], ["tokens", "Tokens", "number hide-small"], ["seconds", "Time", "number hide-small"]];

const ACTIVE = ["text", "run", "first_step", "last_step", "split", "task", "least_reward", "most_reward", "success", "stop", "failure", "tool", "fault", "faulted", "answer", "group", "file"];
const places = new Map(); // by the list's address: the row that was selected, and how far it was scrolled

export async function episodesPage(context) {
  context.title("Episodes");
  const state = { ...context.query };
  const focusSearch = state.focus === "search";
  delete state.focus;
  if (focusSearch) remember({ focus: null });
  let rows = [], selected = 0, version = null, here = location.search, scrolled = 0;
  let left = context.returns ? places.get(here) : undefined;
  const scroll = () => { scrolled = window.scrollY; };
  window.addEventListener("scroll", scroll, { passive: true });
  context.onEnd(() => { window.removeEventListener("scroll", scroll); if (rows[selected]) places.set(here, { episode: place(rows[selected]), scrolled }); });
  const results = h("div", { class: "stack", "aria-busy": "true" });
  const search = h("input", { id: "search", class: "input search-input", type: "search", placeholder: "Search one phrase in what was said, called and answered   ( / )", "aria-label": "Search the text of episodes", value: state.text || "" });
  const form = h("div", { class: "fields" }), chips = h("div", { class: "row" });
  clear(context.frame, h("div", { class: "spread" }, h("h1", {}, "Episodes"), h("span", { id: "count", class: "soft", "aria-live": "polite" })), search, h("div", { class: "filters" }, form, chips), results);
  const clean = (from) => { const all = {}; for (const name of Object.keys(parameters())) all[name] = null; return { ...all, ...from }; };
  const visit = () => { remember(clean(state), true); here = location.search; selected = 0; load(); };
  const change = (changes) => { Object.assign(state, changes, { offset: null }); visit(); show(); };
  let timer = null;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => change({ text: search.value }), 220); });
  search.addEventListener("keydown", (event) => { if (event.key === "Escape" || event.key === "Enter") search.blur(); });
  context.onEnd(() => clearTimeout(timer));

  // The form is made once: a field that is drawn anew would lose the focus, and what is being typed.
  const controls = {};
  const control = (name, made) => (controls[name] = made);
  const onchange = (name) => (event) => change({ [name]: event.target.value });
  const select = (name, title) => h("label", { class: "field" }, title, control(name, h("select", { name, onchange: onchange(name) })));
  const input = (name, label, type = "number") => control(name, h("input", { name, type, step: type === "number" ? "any" : null, "aria-label": label, onchange: onchange(name) }));
  const pair = (title, first, second) => h("div", { class: "field" }, title, h("div", { class: "pair" }, first, second));
  add(form, [
    select("run", "Run"), h("label", { class: "field" }, "Task", input("task", "Task, an id or a pattern", "text")),
    pair("Steps", input("first_step", "First step"), input("last_step", "Last step")), pair("Reward", input("least_reward", "Least reward"), input("most_reward", "Most reward")),
    select("success", "Success"), select("stop", "How it ended"), select("failure", "Lost at"), select("tool", "Calls the tool"), select("fault", "Fault"), select("split", "Split"),
  ]);
  const counted = (list) => (list || []).map((one) => [one.value, `${plain(one.value)} (${number(one.episodes)})`]);
  const withAny = (list) => [...(list?.length ? [["any", "any kind"]] : []), ...counted(list)];
  const offer = (facets) => {
    const choices = { run: facets.runs || [], success: [["yes", "succeeded"], ["no", "did not"]], stop: counted(facets.stop), failure: withAny(facets.failure), tool: counted(facets.tool), fault: withAny(facets.fault), split: counted(facets.split) };
    for (const [name, options] of Object.entries(choices)) if (controls[name] !== document.activeElement) clear(controls[name], h("option", { value: "" }, "any"), options.map(([value, text]) => h("option", { value }, text)));
    const hints = { task: "id or pattern*", first_step: facets.first_step ?? "from", last_step: facets.last_step ?? "to", least_reward: facets.least_reward == null ? "from" : number(facets.least_reward, 2), most_reward: facets.most_reward == null ? "to" : number(facets.most_reward, 2) };
    for (const [name, hint] of Object.entries(hints)) controls[name].placeholder = hint;
  };
  const show = () => {
    for (const [name, one] of Object.entries(controls)) {
      if (one === document.activeElement) continue;
      one.value = String(state[name] ?? "");
      if (one.selectedIndex === -1) one.selectedIndex = 0;
    }
    const active = ACTIVE.filter((name) => state[name] !== undefined && state[name] !== null && state[name] !== "");
    const drop = (names) => { for (const name of names) { if (name === "text") { clearTimeout(timer); search.value = ""; } state[name] = null; } change({}); };
    clear(chips, active.map((name) => h("button", { class: "chip accent", type: "button", title: "Take this filter away", onclick: () => drop([name]) }, `${name.replaceAll("_", " ")}: ${plain(many(state[name]).join(", "))} ✕`)), active.length > 0 && h("button", { class: "button", type: "button", onclick: () => drop(ACTIVE) }, "Clear all"));
  };
  const loadFacets = async () => {
    const [found, runs] = await Promise.all([get("/api/facets", { run: state.run }), get("/api/runs")]);
    if (context.isOver()) return;
    offer({ ...found, runs: runs.runs.map((one) => [one.name, plain(one.name)]) });
    show();
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
    if (left) selected = Math.max(0, rows.findIndex((row) => place(row) === left.episode));
    const kept = results.contains(document.activeElement) ? document.activeElement.dataset.keep : null;
    draw(found);
    if (kept) [...results.querySelectorAll("[data-keep]")].find((one) => one.dataset.keep === kept)?.focus({ preventScroll: true });
    if (left) { window.scrollTo(0, left.scrolled); mark(selected); left = undefined; }
  };
  const draw = (found) => {
    const total = found.summary.episodes, first = found.offset + 1, last = found.offset + rows.length;
    document.getElementById("count").textContent = `${number(total)} episode${total === 1 ? "" : "s"}`;
    announce(`${total} episodes`);
    const sort = state.sort || "step", ascending = state.order === "asc";
    const page = (offset) => { state.offset = offset; visit(); window.scrollTo(0, 0); };
    clear(results,
      total > 0 && h("div", { class: "row", style: { gap: "38px" } }, [["Reward", number(found.summary.reward)], ["Success", percent(found.summary.success)], ["Tasks", number(found.summary.tasks)], ["Turns", number(found.summary.turns, 1)], ["Lost", number(found.summary.lost)]].map(([label, value]) => h("div", { class: "stat" }, h("span", { class: "label" }, label), h("span", { class: "value" }, value)))),
      found.index.waiting > 0 && h("p", { class: "soft small", role: "status" }, `Still reading: ${found.index.waiting} of ${found.index.files} files to go.`),
      rows.length === 0 ? h("div", { class: "panel empty" }, h("h2", {}, "No episode fits"), h("p", {}, total === 0 && !Object.keys(state).some((name) => state[name]) ? "No episodes have been recorded yet (run.trajectories_every)." : "Take a filter away, or search for something else.")) :
      h("div", { class: "table-wrap" }, h("table", {},
        h("thead", {}, h("tr", {}, COLUMNS.map(([key, title, kind]) => h("th", { class: kind, "aria-sort": sort === key ? (ascending ? "ascending" : "descending") : null }, h("button", { type: "button", "data-keep": key, onclick: () => change({ sort: key, order: sort === key && !ascending ? "asc" : null }) }, `${title}${sort === key ? (ascending ? " ↑" : " ↓") : ""}`))), h("th", {}, "How it went"))),
        h("tbody", {}, rows.map((row, n) => line(row, n === selected, state, () => { selected = n; }))))),
      total > PAGE && h("nav", { class: "pager", "aria-label": "Page of the list" }, h("span", { class: "soft" }, `${number(first)}–${number(last)} of ${number(total)}`), h("button", { class: "button", type: "button", "data-keep": "previous page", disabled: found.offset === 0, onclick: () => page(Math.max(0, found.offset - PAGE)) }, "← Previous"), h("button", { class: "button", type: "button", "data-keep": "next page", disabled: last >= total, onclick: () => page(found.offset + PAGE) }, "Next →")));
  };
  const mark = (place) => {
    selected = Math.max(0, Math.min(rows.length - 1, place));
    results.querySelectorAll("tr.item").forEach((one, n) => { one.setAttribute("aria-selected", n === selected ? "true" : "false"); if (n === selected) one.scrollIntoView({ block: "nearest" }); });
  };
  context.onKey((event) => {
    if (event.key === "j" || event.key === "ArrowDown") { event.preventDefault(); mark(selected + 1); }
    else if (event.key === "k" || event.key === "ArrowUp") { event.preventDefault(); mark(selected - 1); }
    else if (event.key === "Enter" && rows[selected] && event.target.tagName !== "BUTTON" && event.target.tagName !== "A") go(opened(rows[selected]));
  });
  offer({});
  show();
  await Promise.all([load(), loadFacets()]);
  if (focusSearch) search.focus();
  context.every(3, async () => {
    const now = (await get("/api/episodes", { ...state, limit: 1, offset: 0 })).index.version;
    if (now !== version) { await load(); await loadFacets(); }
  });
}

// An episode's address that knows the list it was opened from; "?" is the list without filters.
const opened = (row) => episodeUrl(row, { from: location.search || "?" });

function line(row, isSelected, state, choose) {
  const faults = [...new Set(row.faults || [])];
  return h("tr", { class: "item", tabindex: 0, "data-keep": place(row), "aria-selected": isSelected ? "true" : "false", onclick: (event) => { choose(); if (!event.target.closest("a")) go(opened(row)); }, onkeydown: (event) => { if (event.key === "Enter" && event.target === event.currentTarget) { event.stopPropagation(); choose(); go(opened(row)); } } },
    h("td", {}, h("a", { class: "task", href: opened(row) }, plain(row.task || "(no id)")), h("span", { class: "faint small" }, ` · attempt ${row.attempt}${many(state.run).length === 1 ? "" : ` · ${plain(row.run)}`}`),
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
