// Side by side: attempts of a group, one task over time, two runs on the same tasks.

import { address, episodeUrl, get, many, place, post } from "./api.js";
import { clear, h, number, percent, plain, points, rewardClass, signed, toast } from "./dom.js";
import { messageView } from "./message.js";
import { go } from "./app.js";

export async function comparePage(context) {
  context.title("Compare");
  const query = context.query, chosen = many(query.episode);
  if (chosen.length) { await episodes(context, chosen.slice(0, 6)); return; }
  if (query.run && query.task) { await history_(context, query.run, query.task); return; }
  await runs(context, query);
}

const parsed = (text) => { const [run, file, row] = text.split("/"); return { run, file, row: Number(row) }; };
const name = (one) => `${one.run}/${one.file}/${one.row}`;

async function episodes(context, chosen) {
  const found = await Promise.all(chosen.map(async (text) => get(`/api/episode/${place(parsed(text))}`)));
  if (context.isOver()) return;
  const turns = found.map(split), most = Math.max(...turns.map((one) => one.length));
  const same = (n) => turns.every((one) => one[n] && JSON.stringify(one[n].map(bare)) === JSON.stringify(turns[0][n].map(bare)));
  let apart = 0;
  while (apart < most && same(apart)) apart += 1;
  const prefer = async (winner) => {
    try {
      for (const loser of found) if (loser !== winner) await post("/api/prefer", { chosen: parsed(name(winner)), rejected: parsed(name(loser)) });
      toast("Preferred: DPO and reward models can learn from it (labels/preferences.jsonl)");
    } catch (error) { toast(error.message); }
  };
  clear(context.frame,
    h("div", { class: "spread" }, h("h1", {}, `${found.length} episodes side by side`), h("div", { class: "row" }, h("a", { class: "button", href: address("/export/episode.html", { episode: chosen }), download: "comparison.html" }, "HTML"), h("a", { class: "button", href: address("/export/episode.json", { episode: chosen }), download: "comparison.json" }, "JSON"))),
    h("div", { class: "side-by-side", tabindex: 0, role: "region", "aria-label": "The episodes, side by side" }, h("div", { class: "stack", style: { "min-width": `${316 * found.length - 16}px` } }, h("div", { class: "columns" }, found.map((one) => {
      const own = one.attempts.find((other) => other.row === one.row);
      return h("section", { class: "panel column-head", "aria-label": `attempt ${one.attempt}` },
        h("div", { class: "spread" }, h("div", {}, h("a", { class: "link", href: episodeUrl(one) }, h("b", {}, `attempt ${one.attempt}`)), h("div", { class: "small faint" }, `${plain(one.run)} · step ${one.step} · ${plain(one.task.id)}`)), h("span", { class: `big ${rewardClass(one.reward, own?.success)}`, style: { "font-size": "1.8rem" } }, one.reward === null ? "–" : number(one.reward))),
        h("div", { class: "row small", style: { "margin-top": "8px" } }, own?.advantage != null && h("span", { class: `chip ${own.advantage > 0 ? "good" : own.advantage < 0 ? "bad" : ""}` }, `advantage ${own.advantage > 0 ? "+" : ""}${number(own.advantage, 2)}`), h("span", { class: "chip" }, plain(one.stop)), h("span", { class: "chip" }, `${one.turns.length} turns`), one.rewards.slice(0, 4).map(([part, value]) => h("span", { class: "chip" }, `${plain(part)} ${number(value, 2)}`))),
        found.length > 1 && h("p", { style: { "margin-top": "10px" } }, h("button", { class: "button", type: "button", onclick: () => prefer(one) }, "✓ Prefer this one")));
    })),
    h("div", { class: "aligned" }, Array.from({ length: most }, (_, n) => [
      n === apart && apart > 0 && h("div", { class: "divider" }, `from here on they differ (turn ${n})`),
      h("div", { class: "pair" }, turns.map((one, side) => (one[n] ? h("div", { class: "messages" }, one[n].map((message) => messageView(message, { turn: found[side].turns[message.turn] ?? null, number: message.turn ?? undefined, episode: found[side], media: { url: (sha256) => `/api/media/${encodeURIComponent(found[side].run)}/${sha256}` } }))) : h("div", { class: "gone" }, "over by now")))),
    ])))));
}

// The messages by turn: first what was asked, then each action with what followed it.
function split(episode) {
  const found = [[]];
  for (const message of episode.messages) {
    if (message.turn !== null) found.push([]);
    found.at(-1).push(message);
  }
  return found;
}
const bare = (message) => [message.role, message.content, message.calls.map((one) => [one.name, one.arguments])];

async function history_(context, run, task) {
  const found = (await get(`/api/history/${encodeURIComponent(run)}`, { task })).episodes;
  if (context.isOver()) return;
  if (!found.length) { clear(context.frame, h("div", { class: "panel empty" }, h("h2", {}, "This task was not recorded in that run"))); return; }
  const steps = [...new Set(found.map((one) => one.step))], chosen = new Set([found.find((one) => one.step === steps[0]), found.find((one) => one.step === steps.at(-1))].filter(Boolean).map(name));
  const button = h("button", { class: "button primary", type: "button", onclick: () => go(address("/compare", { episode: [...chosen] })) }, "Compare the chosen");
  clear(context.frame, h("h1", {}, plain(task)), h("p", { class: "soft" }, `All ${found.length} recorded attempts at this task in ${plain(run)}. Choose two or more; they are aligned turn by turn.`), h("div", {}, button),
    h("div", { class: "table-wrap" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "Step", "Split", "Attempt", "Reward", "Turns", "How it went"].map((one) => h("th", {}, one)))),
      h("tbody", {}, found.map((one) => h("tr", {}, h("td", {}, h("input", { type: "checkbox", "aria-label": `step ${one.step}, attempt ${one.attempt}`, checked: chosen.has(name(one)), onchange: (event) => { if (event.target.checked) chosen.add(name(one)); else chosen.delete(name(one)); } })), h("td", {}, one.step), h("td", {}, plain(one.split)), h("td", {}, h("a", { class: "link", href: episodeUrl(one) }, `attempt ${one.attempt}`)), h("td", { class: rewardClass(one.reward, one.success) }, one.reward === null ? "lost" : number(one.reward)), h("td", {}, one.turns), h("td", {}, plain(one.failure || one.stop))))))));
}

async function runs(context, query) {
  const all = (await get("/api/runs")).runs.map((one) => one.name);
  // Without a choice: the newest run (second) against the one before it, never a run against itself if there is another.
  const another = (run) => all.find((one) => one !== run) || run || "";
  const second = query.b_run || (query.a_run ? another(query.a_run) : all[0] || ""), first = query.a_run || another(second);
  const sides = { a: { run: first, split: query.a_split || "", step: query.a_step || "" }, b: { run: second, split: query.b_split || "", step: query.b_step || "" } };
  const steps = {};
  for (const side of ["a", "b"]) if (sides[side].run) steps[side] = (await get(`/api/steps/${encodeURIComponent(sides[side].run)}`)).steps;
  if (context.isOver()) return;
  const set = (changes) => go(address("/compare", { a_run: sides.a.run, a_split: sides.a.split, a_step: sides.a.step, b_run: sides.b.run, b_split: sides.b.split, b_step: sides.b.step, ...changes }));
  const pick = (side, title) => {
    const own = sides[side], list = steps[side] || [], splits = [...new Set(list.map((one) => one.split))];
    return h("fieldset", { class: "panel stack", style: { gap: "10px", border: "1px solid var(--line)" } }, h("legend", { class: "hidden-text" }, title), h("h2", {}, title),
      h("label", { class: "field" }, "Run", h("select", { onchange: (event) => set({ [`${side}_run`]: event.target.value, [`${side}_split`]: null, [`${side}_step`]: null }) }, all.map((one) => h("option", { value: one, selected: one === own.run }, plain(one))))),
      h("label", { class: "field" }, "Split", h("select", { onchange: (event) => set({ [`${side}_split`]: event.target.value, [`${side}_step`]: null }) }, h("option", { value: "" }, "all"), splits.map((one) => h("option", { value: one, selected: one === own.split }, plain(one))))),
      h("label", { class: "field" }, "Checkpoint (step)", h("select", { onchange: (event) => set({ [`${side}_step`]: event.target.value }) }, h("option", { value: "" }, "all"), list.filter((one) => !own.split || one.split === own.split).map((one) => h("option", { value: one.step, selected: String(one.step) === String(own.step) }, `step ${one.step} (${one.tasks} tasks)`)))));
  };
  const result = h("div", { class: "stack" });
  clear(context.frame, h("h1", {}, "Compare"), h("p", { class: "soft" }, "Two sides on the tasks that both have played: the paired statistics of ludus eval. Differences are second minus first: green where the second is better. To see attempts side by side, open an episode and choose “Compare attempts”; to overlay curves, choose runs on the first page."),
    h("div", { class: "charts large" }, pick("a", "First"), pick("b", "Second")), result);
  if (!all.length) { clear(result, h("p", { class: "empty" }, "There are no runs.")); return; }
  const found = await get("/api/paired", { a_run: sides.a.run, a_split: sides.a.split, a_step: sides.a.step, b_run: sides.b.run, b_split: sides.b.split, b_step: sides.b.step });
  if (context.isOver()) return;
  if (!found.statistics) { clear(result, h("div", { class: "panel empty" }, h("h2", {}, "They share no scored task"), h("p", {}, `${found.only_first} tasks are the first's alone, ${found.only_second} the second's.`))); return; }
  const sides_ = [parsedSide(sides.a), parsedSide(sides.b)];
  clear(result,
    h("div", { class: "charts large" }, ["success", "reward"].map((metric) => statistic(metric, found.statistics[metric], found.tasks))),
    h("h2", {}, "Task by task, the largest differences first"),
    h("div", { class: "table-wrap" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Task"), ["First", "Second", "Second minus first"].map((one) => h("th", { class: "number" }, one)), h("th", {}, ""))),
      h("tbody", {}, found.by_task.slice(0, 200).map((one) => h("tr", {}, h("td", { class: "task" }, plain(one.task)), h("td", { class: "number" }, percent(one.first)), h("td", { class: "number" }, percent(one.second)), difference("td", "number", points(one.second - one.first, 0)), h("td", {}, h("a", { class: "link", href: address("/compare", { episode: [`${sides_[0]}/${one.first_episode.file}/${one.first_episode.row}`, `${sides_[1]}/${one.second_episode.file}/${one.second_episode.row}`] }) }, "side by side"))))))));
}

const parsedSide = (side) => side.run;

// Second minus first: coloured where it is one, and no chance.
const difference = (tag, kind, { sign, text }, sure = true) => h(tag, { class: `${kind} reward ${sure ? ["bad", "", "good"][sign + 1] : ""}` }, text);

function statistic(metric, test, tasks) {
  const shown = metric === "success" ? (value) => `${(100 * value).toFixed(1)}%` : (value) => number(value);
  const reach = Math.max(Math.abs(test.low ?? test.difference), Math.abs(test.high ?? test.difference), Math.abs(test.difference), 1e-9) * 1.15;
  const at = (value) => `${50 + (50 * value) / reach}%`;
  const sure = test.p_flip < 0.05;
  return h("div", { class: "panel stack", style: { gap: "8px" } }, h("h2", {}, metric === "success" ? "Success" : "Reward"),
    h("div", { class: "row", style: { gap: "28px" } }, h("div", { class: "stat" }, h("span", { class: "label" }, "First"), h("span", { class: "value" }, shown(test.first))), h("div", { class: "stat" }, h("span", { class: "label" }, "Second"), h("span", { class: "value" }, shown(test.second))), h("div", { class: "stat" }, h("span", { class: "label" }, "Second minus first"), difference("span", "big", metric === "success" ? points(test.difference, 1) : signed(test.difference), sure))),
    h("div", { class: "interval", role: "img", "aria-label": `95% interval from ${test.low} to ${test.high}` }, h("span", { class: "zero", style: { left: "50%" } }), test.low !== null && h("span", { class: "span", style: { left: at(test.low), width: `calc(${at(test.high)} - ${at(test.low)})` } }), h("span", { class: "point", style: { left: at(test.difference) } })),
    h("p", { class: "soft small" }, test.low !== null ? `95% interval ${shown(test.low)} to ${shown(test.high)}. ` : "", `The second is better on ${test.wins} tasks, worse on ${test.losses}, the same on ${test.ties}, of ${tasks}. p = ${number(test.p_flip, 4)} (sign-flip${test.is_exact ? ", exact" : ""}), ${number(test.p_sign, 4)} (signs).`),
    h("p", {}, h("span", { class: `chip ${sure ? (test.difference > 0 ? "good" : "bad") : ""}` }, sure ? `the second is ${test.difference > 0 ? "better" : "worse"}: chance alone is unlikely` : "could be chance")));
}
