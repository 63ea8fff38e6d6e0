// What people have said about episodes, and where it is kept.

import { episodeUrl, get } from "./api.js";
import { ago, clear, h, number, plain } from "./dom.js";

export async function labelsPage(context) {
  context.title("Labels");
  const found = await get("/api/labels");
  if (context.isOver()) return;
  const good = found.labels.filter((one) => one.label).length;
  const link = (one) => (one.run.startsWith("(") ? plain(one.run) : h("a", { class: "link", href: episodeUrl(one) }, `${plain(one.run)} ${plain(one.file)} #${one.row}`));
  clear(context.frame, h("h1", {}, "Labels"),
    h("div", { class: "row", style: { gap: "38px" } }, [["Good", good], ["Bad", found.labels.length - good], ["Preferences", found.preferences.length]].map(([label, value]) => h("div", { class: "stat" }, h("span", { class: "label" }, label), h("span", { class: "value" }, number(value))))),
    h("div", { class: "panel stack", style: { gap: "6px" } }, h("p", {}, "Kept in ", h("code", {}, plain(found.folder)), ", apart from the runs:"), h("ul", { class: "soft" }, [["good.jsonl", "conversations to imitate: [[stage]] kind = \"sft\", demonstrations"], ["labels.jsonl", "good and bad answers: [[stage]] kind = \"dpo\", loss = \"kto\", and reward models"], ["preferences.jsonl", "chosen and rejected: [[stage]] kind = \"dpo\", and reward models"]].map(([file, what]) => h("li", {}, h("code", {}, file), ` — ${what}`)))),
    found.labels.length + found.preferences.length === 0 ? h("div", { class: "panel empty" }, h("h2", {}, "Nothing is labelled yet"), h("p", {}, "Open an episode and press g (good) or b (bad), or prefer one of several in a comparison.")) :
    h("div", { class: "table-wrap" }, h("table", {}, h("thead", {}, h("tr", {}, ["Said", "Task", "Episode", "Note", "When"].map((one) => h("th", {}, one)))), h("tbody", {},
      found.labels.map((one) => h("tr", {}, h("td", {}, h("span", { class: `chip ${one.label ? "good" : "bad"}` }, one.label ? "good" : "bad")), h("td", {}, plain(one.task)), h("td", {}, link(one.episode)), h("td", {}, plain(one.note || "")), h("td", { class: "soft" }, ago(one.time)))),
      found.preferences.map((one) => h("tr", {}, h("td", {}, h("span", { class: "chip accent" }, "prefers")), h("td", {}, plain(one.task)), h("td", {}, link(one.chosen_episode), " over ", link(one.rejected_episode)), h("td", {}, plain(one.note || "")), h("td", { class: "soft" }, ago(one.time))))))));
}
