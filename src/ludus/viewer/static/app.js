// The frame of all pages: the bar, the router, keys that work everywhere.

import { address, get, parameters } from "./api.js";
import { add, announce, clear, h } from "./dom.js";
import { comparePage } from "./compare.js";
import { episodePage } from "./episode.js";
import { episodesPage } from "./episodes.js";
import { labelsPage } from "./labels.js";
import { playPage } from "./play.js";
import { runPage, runsPage } from "./runs.js";

const main = document.getElementById("main");
const ROUTES = [
  [/^\/$/, runsPage, "Runs"],
  [/^\/run\/([^/]+)$/, runPage, "Runs"],
  [/^\/episodes$/, episodesPage, "Episodes"],
  [/^\/episode\/([^/]+)\/([^/]+)\/(\d+)$/, episodePage, "Episodes"],
  [/^\/compare$/, comparePage, "Compare"],
  [/^\/labels$/, labelsPage, "Labels"],
  [/^\/play$/, playPage, "Play"],
];
let leave = [], shown = "";

// What a page gets: where to draw, its parts of the address, and how to hear of its end.
async function route(event) {
  for (const end of leave) end();
  leave = [];
  const before = shown;
  shown = location.pathname;
  const found = ROUTES.map(([pattern, page, name]) => [location.pathname.match(pattern), page, name]).find(([match]) => match);
  bar(found?.[2]);
  if (!found) { clear(main, h("div", { class: "empty" }, h("h2", {}, "There is no such page"), h("a", { class: "link", href: "/" }, "All runs"))); return; }
  const [match, page, name] = found;
  let over = false;
  leave.push(() => { over = true; });
  const frame = h("div", { class: "stack" });
  const context = {
    frame,
    parts: match.slice(1).map(decodeURIComponent),
    query: parameters(),
    returns: event?.type === "popstate" || before.startsWith("/episode/"), // to a list that was left for one of its rows
    isOver: () => over,
    title: (text) => { document.title = `${text} · Ludus`; },
    onEnd: (end) => leave.push(end),
    onKey: (handler) => { const own = (event) => { if (!typing(event)) handler(event); }; document.addEventListener("keydown", own); leave.push(() => document.removeEventListener("keydown", own)); },
    every: (seconds, work) => {
      let timer = null;
      const tick = async () => {
        if (over) return;
        if (!document.hidden) { try { await work(); } catch { /* the next round tries again; the page says what is wrong at its next load */ } }
        if (!over) timer = setTimeout(tick, 1000 * seconds);
      };
      timer = setTimeout(tick, 1000 * seconds);
      leave.push(() => clearTimeout(timer));
    },
  };
  document.title = `${name} · Ludus`;
  clear(main, frame);
  try { await page(context); if (!over) announce(document.title); }
  catch (error) { if (!over) clear(frame, failure(error)); }
}

export function failure(error) {
  const gone = error.status === 404;
  return h("div", { class: "error-box", role: "alert" }, h("b", {}, gone ? "Not there: " : "That did not work: "), error.message, " ", h("a", { class: "link", href: "/" }, "All runs"));
}

const typing = (event) => event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || document.querySelector("dialog[open]");

export function go(url) {
  history.pushState(null, "", url);
  window.scrollTo(0, 0);
  route().then(() => main.focus({ preventScroll: true }));
}

let described = null;
async function bar(current) {
  const links = [["Runs", "/"], ["Episodes", "/episodes"], ["Compare", "/compare"], ["Labels", "/labels"]];
  try { described ??= await get("/api/runs"); } catch { /* the page itself says so */ }
  if (described?.play) links.push(["Play", "/play"]);
  clear(document.getElementById("bar"),
    h("a", { class: "brand", href: "/", "aria-label": "Ludus, all runs" }, h("img", { src: "/static/icon.svg", alt: "" }), h("span", {}, "Ludus")),
    h("nav", { "aria-label": "Pages" }, links.map(([name, url]) => h("a", { href: url, "aria-current": name === current ? "page" : null }, name))),
    h("div", { class: "end" },
      described && h("span", { class: "root", title: described.root }, `\u200e${described.root}`),
      h("button", { class: "icon-button", type: "button", title: "Dark or light", "aria-label": "Change between dark and light", onclick: theme }, "◐"),
      h("button", { class: "icon-button", type: "button", title: "Keys (?)", "aria-label": "Show keyboard shortcuts", onclick: help }, "?")));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("ludus-theme", root.dataset.theme); } catch { /* it holds for this page */ }
}

const KEYS = [
  ["/", "search episodes"], ["j  k", "next, previous"], ["n  p", "next, previous episode of the list (in a replay)"], ["Enter", "open what is selected"], ["←  →", "turn by turn (in a replay)"],
  ["Space", "play and pause"], ["[  ]", "previous, next attempt of the group"], ["t", "tokens, and back"], ["g", "good episode"], ["b", "bad episode"],
  ["u", "back to the list"], ["r", "all runs"], ["?", "this help"],
];
function help() {
  const close = h("button", { class: "button", type: "button" }, "Close");
  const made = h("dialog", { class: "help", "aria-label": "Keyboard shortcuts" }, h("h2", {}, "Keys"), h("div", { class: "keys" }, KEYS.flatMap(([keys, what]) => [h("span", {}, keys.split("  ").map((one) => [h("kbd", {}, one), " "])), h("span", { class: "soft" }, what)])), h("p", { style: { "margin-top": "18px" } }, close));
  close.addEventListener("click", () => made.close());
  made.addEventListener("close", () => made.remove());
  document.body.append(made);
  made.showModal();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || link.target || link.hasAttribute("download")) return;
  const url = new URL(link.href, location.href);
  if (url.origin !== location.origin || /^\/(api|static|export)\//.test(url.pathname) || (url.hash && url.pathname === location.pathname)) return;
  event.preventDefault();
  go(url.pathname + url.search);
});
document.addEventListener("keydown", (event) => {
  const keys = document.querySelector("dialog.help[open]");
  if (event.key === "?" && keys) { event.preventDefault(); keys.close(); return; }
  if (typing(event)) return;
  if (event.key === "?") { event.preventDefault(); help(); }
  else if (event.key === "/") {
    event.preventDefault();
    const field = document.getElementById("search");
    if (field) field.focus(); else go("/episodes?focus=search");
  } else if (event.key === "r") go("/");
});
window.addEventListener("popstate", route);
route();

export { add, address };
