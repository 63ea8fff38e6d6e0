// One episode: replay turn by turn, tokens, prompt, timings; labels and export.

import { address, episodeUrl, get, parameters, place, post, remember } from "./api.js";
import { announce, clear, duration, h, number, percent, plain, rewardClass, s, said, toast } from "./dom.js";
import { messageView, renderView } from "./message.js";
import { tokenView } from "./tokens.js";
import { go } from "./app.js";

export async function episodePage(context) {
  const [run, file, row] = context.parts;
  const episode = { run, file, row: Number(row) };
  const state = { ...context.query };
  const [data, labels] = await Promise.all([get(`/api/episode/${place(episode)}`), get("/api/labels")]);
  if (context.isOver()) return;
  context.title(data.task.id || "Episode");
  const media = { url: (sha256) => `/api/media/${encodeURIComponent(run)}/${sha256}` };
  const said_ = data.messages.filter((one) => one.turn !== null);
  const last = Math.max(0, said_.length - 1);
  let turn = Math.max(0, Math.min(last, Number(state.turn ?? 0))), playing = null, follows = state.turn !== undefined;
  let label = labels.labels.find((one) => one.episode.run === run && one.episode.file === file && one.episode.row === episode.row)?.label ?? null;

  const own = data.attempts.find((one) => one.row === episode.row);
  const header = h("div", { class: "stack", style: { gap: "14px" } }), view = h("div", { class: "stack" });
  clear(context.frame, header, view);
  const back = state.from === undefined ? address("/episodes", { run }) : state.from === "?" ? "/episodes" : `/episodes?${state.from.replace(/^\?/, "")}`;
  let near = {}; // its neighbours in the list that it was opened from, or in that of its run
  const open_ = (one) => episodeUrl(one, { from: state.from, view: state.view });
  const beside = (side, text, key) => (near[side] ? h("a", { class: "link", href: open_(near[side]), title: key }, text) : h("span", { class: "faint" }, text));
  const setLabel = async (value) => {
    try { await post("/api/label", { episode, label: value === label ? null : value }); label = value === label ? null : value; toast(label === null ? "Label taken back" : label ? "Labelled good: SFT and KTO can learn from it" : "Labelled bad: KTO can learn from it"); drawHeader(); }
    catch (error) { toast(error.message); }
  };
  const tab = (key) => { state.view = key; remember({ view: key === "replay" ? null : key }); stop(); drawHeader(); drawView(); };
  const TABS = [["replay", "Replay"], ["tokens", "Tokens"], ["prompt", "Prompt"], ...(data.attempts.some((one) => one.branch !== null) ? [["tree", "Tree"]] : []), ["details", "Details"]];
  const drawHeader = () => clear(header,
    h("div", { class: "row small" }, h("a", { class: "link", href: back }, "← Episodes"), h("span", { class: "faint" }, "/"), h("a", { class: "link", href: `/run/${encodeURIComponent(run)}` }, plain(run)), h("span", { class: "faint" }, `/ step ${data.step} / ${plain(data.split)}`),
      near.place && h("nav", { class: "row neighbours", "aria-label": "Episodes of the list" }, beside("previous", "← Previous", "p"), h("span", { class: "soft" }, `${number(near.place)} of ${number(near.episodes)}`), beside("next", "Next →", "n"))),
    h("div", { class: "spread", style: { "align-items": "flex-start" } },
      h("div", { style: { "min-width": 0, flex: "1 1 380px" } }, h("h1", {}, plain(data.task.id || "(no id)")), h("div", { class: "row", style: { "margin-top": "8px" } },
        h("span", { class: `chip ${data.failure ? "bad" : ""}` }, data.failure ? `lost at ${plain(data.failure.boundary)}` : plain(data.stop)), h("span", { class: "chip" }, `attempt ${data.attempt}`), h("span", { class: "chip" }, `${data.turns.length} turns`), h("span", { class: "chip" }, `${number(data.action_tokens)} tokens said`),
        own?.advantage !== null && own?.advantage !== undefined && h("span", { class: `chip ${own.advantage > 0 ? "good" : own.advantage < 0 ? "bad" : ""}` }, `advantage ${own.advantage > 0 ? "+" : ""}${number(own.advantage, 2)}`), data.branch && h("span", { class: "chip accent" }, `branch of attempt ${data.branch.attempt} (${plain(data.branch.state)})`), data.sequences.length > 1 && h("span", { class: "chip accent" }, `${data.sequences.length} threads`))),
      h("div", { class: "right" }, h("div", { class: `big ${rewardClass(data.reward, own?.success)}` }, data.reward === null ? "–" : number(data.reward)), h("div", { class: "small faint" }, data.reward === null ? "not scored" : own?.success ? "reward · success" : "reward · no success"))),
    data.failure && h("div", { class: "error-box" }, h("b", {}, `Lost through no fault of the model's, at ${plain(data.failure.boundary)}: `), said(data.failure.message), h("span", { class: "small" }, ` (${plain(data.failure.kind)}, ${data.failure.attempts} tries; in no loss and no baseline)`)),
    data.attempts.length > 1 && h("div", { class: "stack", style: { gap: "6px" } }, h("span", { class: "small faint" }, `The ${data.attempts.length} attempts of the group`), h("nav", { class: "attempts", "aria-label": "Attempts of the group" }, data.attempts.map((one) => h("a", { href: open_(one), "aria-current": one.row === episode.row ? "true" : null }, `attempt ${one.attempt}`, h("b", { class: rewardClass(one.reward, one.success) }, one.reward === null ? "lost" : number(one.reward)))))),
    h("div", { class: "spread" },
      h("div", { class: "tabs", role: "tablist" }, TABS.map(([key, title]) => h("button", { role: "tab", type: "button", "aria-selected": (state.view || "replay") === key ? "true" : "false", onclick: () => tab(key) }, title))),
      h("div", { class: "row" },
        h("button", { class: "button", type: "button", "aria-pressed": label === true ? "true" : "false", onclick: () => setLabel(true), title: "g" }, "✓ Good"), h("button", { class: "button", type: "button", "aria-pressed": label === false ? "true" : "false", onclick: () => setLabel(false), title: "b" }, "✗ Bad"),
        data.attempts.length > 1 && h("a", { class: "button", href: address("/compare", { episode: data.attempts.slice(0, 4).map((one) => `${one.run}/${one.file}/${one.row}`) }) }, "Compare attempts"),
        h("a", { class: "button", href: address("/compare", { run, task: data.task.id }) }, "Over time"),
        h("a", { class: "button", href: address("/export/episode.html", { episode: `${run}/${file}/${row}` }), download: "episode.html" }, "HTML"), h("a", { class: "button", href: address("/export/episode.json", { episode: `${run}/${file}/${row}` }), download: "episode.json" }, "JSON"))));

  const messages = h("div", { class: "messages" }), rail = h("aside", { class: "rail", "aria-label": "This turn" });
  const views = [];
  let count = -1;
  for (const message of data.messages) {
    const mine = message.turn ?? undefined;
    count = mine ?? count;
    const made = messageView(message, { turn: mine === undefined ? null : data.turns[mine], number: mine, episode, media });
    if (mine !== undefined) made.addEventListener("click", (event) => { if (!event.target.closest("button, summary, a") && !getSelection().toString()) { follows = true; step(mine, false); } });
    views.push([made, count]);
    messages.append(made);
  }
  if (data.more_messages) messages.append(h("p", { class: "soft" }, `${data.more_messages} more messages; JSON has the first of them, the Parquet file all.`));

  const step = (to, scroll = true) => {
    turn = Math.max(0, Math.min(last, to));
    remember({ turn: follows ? turn : null });
    for (const [made, of] of views) {
      made.classList.toggle("now", follows && of === turn && made.classList.contains("assistant"));
      made.classList.toggle("later", follows && of > turn);
    }
    if (scroll && follows) views.find(([made, of]) => of === turn && made.classList.contains("assistant"))?.[0].scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    drawRail();
  };
  const stop = () => { clearInterval(playing); playing = null; };
  const play = () => {
    if (playing) { stop(); drawRail(); return; }
    follows = true;
    if (turn >= last) turn = -1;
    playing = setInterval(() => { if (turn >= last) { stop(); drawRail(); } else step(turn + 1); }, 1100);
    step(turn + 1);
  };
  context.onEnd(stop);

  const drawRail = () => {
    const now = data.turns[turn], renders = data.renders.filter((one) => one.turn === turn), after = data.renders.filter((one) => one.turn === turn + 1);
    const shown = follows && turn === last && after.length ? after : renders;
    const worst = Math.max(...data.rewards.map(([, value]) => Math.abs(value || 0)), 1e-9);
    clear(rail,
      h("div", { class: "panel stack", style: { gap: "12px" } }, h("div", { class: "player", role: "group", "aria-label": "Replay" },
        h("button", { class: "button", type: "button", "aria-label": "First turn", onclick: () => { follows = true; step(0); } }, "⇤"), h("button", { class: "button", type: "button", "aria-label": "Previous turn", onclick: () => { follows = true; step(turn - 1); } }, "◀"),
        h("button", { class: "button primary", type: "button", "aria-label": playing ? "Pause" : "Play", onclick: play }, playing ? "Pause" : "Play"), h("button", { class: "button", type: "button", "aria-label": "Next turn", onclick: () => { follows = true; step(turn + 1); } }, "▶"), h("output", { "aria-live": "off" }, data.turns.length ? `${turn + 1} of ${data.turns.length}` : "no turns")),
        shown.map((one) => renderView(one, media)),
        now && h("dl", { class: "facts" }, [["Reward of the turn", now.reward === null ? "–" : number(now.reward)], ["Advantage", now.advantage === null ? "not trained on" : `${now.advantage > 0 ? "+" : ""}${number(now.advantage)}`], ["Log-probability", now.logprob === null ? "–" : `${number(now.logprob)} per token`], ["Entropy", now.entropy === null ? "–" : `${number(now.entropy)} nats`], ["Policy version", now.versions.map(([, version]) => version).join(" → ") || "–"], ["Ended by", now.finish ? now.finish.replaceAll("_", " ") : "–"]].flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))),
      data.rewards.length > 0 && h("div", { class: "panel stack", style: { gap: "10px" } }, h("h2", {}, "Reward"), h("div", { class: "parts" }, data.rewards.map(([name, value]) => h("div", { class: "line" }, h("span", {}, plain(name)), h("span", { class: "track" }, h("span", { class: `fill ${value < 0 ? "negative" : ""}`, style: { width: `${(100 * Math.abs(value || 0)) / worst}%` } })), h("b", { class: "right" }, number(value)))))),
      h("div", { class: "panel stack", style: { gap: "10px" } }, h("div", { class: "spread" }, h("h2", {}, "Time"), h("span", { class: "soft small" }, duration(data.seconds.total))), waterfall(data, turn, follows)));
  };

  const drawView = async () => {
    const key = state.view || "replay";
    if (key === "tokens") { await tokenView(view, episode, state, remember); return; }
    if (key === "prompt") { await promptView(view, episode); return; }
    if (key === "tree") { clear(view, treeView(data, episode, state)); return; }
    if (key === "details") { clear(view, details(data, episode)); return; }
    clear(view, h("div", { class: "episode" }, messages, rail));
    step(turn, follows && turn > 0);
  };

  context.onKey((event) => {
    const attempts = data.attempts, at = attempts.findIndex((one) => one.row === episode.row);
    const acts = {
      ArrowRight: () => { follows = true; step(turn + 1); }, ArrowLeft: () => { follows = true; step(turn - 1); }, j: () => { follows = true; step(turn + 1); }, k: () => { follows = true; step(turn - 1); },
      " ": play, Home: () => { follows = true; step(0); }, End: () => { follows = true; step(last); },
      t: () => tab(state.view === "tokens" ? "replay" : "tokens"), g: () => setLabel(true), b: () => setLabel(false), u: () => go(back), n: () => near.next && go(open_(near.next)), p: () => near.previous && go(open_(near.previous)),
      "]": () => attempts[at + 1] && go(open_(attempts[at + 1])), "[": () => attempts[at - 1] && go(open_(attempts[at - 1])),
    };
    const replay = (state.view || "replay") === "replay";
    const act = acts[event.key];
    if (!act || (!replay && /^(Arrow|Home|End| |j|k)/.test(event.key)) || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    act();
    if (replay && /^(Arrow|j|k)/.test(event.key)) announce(`turn ${turn + 1} of ${data.turns.length}: ${said_[turn]?.content.slice(0, 200) ?? ""}`);
  });
  drawHeader();
  await drawView();
  near = await get(`/api/neighbours/${place(episode)}`, state.from === undefined ? { run } : parameters(state.from));
  if (!context.isOver()) drawHeader();
}

function waterfall(data, turn, follows) {
  if (!data.spans.length) {
    const parts = Object.entries(data.seconds).filter(([name]) => name !== "total");
    return parts.length ? h("dl", { class: "facts" }, parts.flatMap(([name, value]) => [h("dt", {}, plain(name)), h("dd", {}, duration(value))])) : h("p", { class: "soft small" }, "No timings were recorded.");
  }
  const end = Math.max(...data.spans.map((one) => one.start + one.seconds), 1e-9);
  return h("div", { class: "stack", style: { gap: "8px" } }, h("div", { class: "waterfall", role: "list" }, data.spans.slice(0, 300).map((one) => h("div", { class: `line ${follows && one.turn === turn ? "now" : ""}`, role: "listitem", title: `${one.kind} ${plain(one.name)}: from ${duration(one.start)}, for ${duration(one.seconds)}` },
    h("span", {}, one.kind === "tool" ? plain(one.name) : one.kind === "queue" ? `waits${one.name ? ` (${plain(one.name)})` : ""}` : one.kind), h("span", { class: `track kind-${one.kind}` }, h("span", { class: "bar-piece", style: { left: `${(100 * one.start) / end}%`, width: `${(100 * one.seconds) / end}%` } })), h("span", { class: "right" }, duration(one.seconds))))),
    h("div", { class: "legend" }, [...new Set(data.spans.map((one) => one.kind))].map((kind) => h("span", { class: `kind-${kind}` }, h("i", { class: "x", style: { background: "var(--c)" } }), kind))));
}

async function promptView(view, episode) {
  clear(view, h("p", { class: "soft" }, "Reading tokens…"));
  const found = await get(`/api/tokens/${place(episode)}`, { sequence: 0, offset: 0 });
  clear(view, h("p", { class: "soft" }, "What the model read and wrote, decoded from the recorded tokens, special tokens included: nothing was rendered again."),
    !found.decoded && h("div", { class: "error-box" }, "The run has no checkpoint with a tokenizer, so tokens cannot be shown as text."),
    found.segments.map((segment) => h("div", { class: `segment whole ${segment.kind}` }, h("span", { class: "label" }, `${segment.kind} · ${segment.ids.length} tokens`), h("pre", { class: "said", style: { margin: "4px 0 0" } }, segment.texts ? said(segment.texts.join("")) : segment.ids.join(" ")))));
}

function details(data, episode) {
  const rows = [["Run", data.run], ["File", data.file], ["Row", data.row], ["Group", data.group], ["Seed", data.seed], ["Target", data.task.target], ["Environments", data.task.envs], ["Metadata", data.task.metadata], ["Answer", data.answer ?? "–"], ["Prompt tokens", number(data.prompt_tokens)], ["Observation tokens", number(data.observation_tokens)], ["Action tokens", number(data.action_tokens)], ...Object.entries(data.counts).map(([name, value]) => [name, number(value)]), ...Object.entries(data.seconds).map(([name, value]) => [`Seconds: ${name}`, duration(value)]), ["In a terminal", `ludus show RUN --step ${data.step} --task '${data.task.id}' --attempt ${data.attempt} --prompt`]];
  return h("div", { class: "panel stack" }, h("dl", { class: "facts" }, rows.flatMap(([name, value]) => [h("dt", {}, plain(name)), h("dd", { class: "mono said" }, said(String(value)))])), data.sequences.length > 1 && h("div", {}, h("h2", {}, "Threads"), h("p", { class: "soft" }, "Conversations of this episode; one that shares a prefix names its parent."), data.sequences.map((one, n) => h("p", {}, h("a", { class: "link", href: episodeUrl(episode, { view: "tokens", sequence: n }) }, `Thread ${n + 1}`), ` ${one.turns} turns, ${one.tokens} tokens${one.parent ? `, goes on from segment ${one.parent[1]} of thread ${one.parent[0] + 1}` : ""}`))));
}

function treeView(data, episode, state) {
  const rows = data.attempts, known = new Map(rows.map((one) => [one.attempt, one])), order = [];
  const visit = (one, depth, parent) => { order.push([one, depth, parent]); for (const child of rows.filter((other) => other.branch === one.attempt && other.row !== one.row)) visit(child, depth + 1, one); };
  for (const root of rows.filter((one) => one.branch === null || !known.has(one.branch))) visit(root, 0, null);
  const place_ = new Map(order.map(([one], n) => [one.row, n]));
  const box = s("svg", { width: "100%", height: 34 * order.length + 20, role: "img", "aria-label": "The attempts of the group as a tree" });
  for (const [one, depth, parent] of order) {
    const y = 24 + 34 * place_.get(one.row), x = 20 + 46 * depth;
    if (parent) { const py = 24 + 34 * place_.get(parent.row); box.append(s("path", { d: `M${x - 46},${py}V${y - 10}Q${x - 46},${y} ${x - 36},${y}H${x}` })); }
    const tone = one.reward === null ? "var(--faint)" : one.success ? "var(--good)" : "var(--bad)";
    box.append(s("a", { href: episodeUrl(one, { from: state.from, view: "tree" }) }, s("circle", { cx: x, cy: y, r: one.row === episode.row ? 9 : 7, style: { fill: tone } }), s("text", { x: x + 16, y: y + 4 }, `attempt ${one.attempt}: ${one.reward === null ? "lost" : number(one.reward)}`), s("text", { class: "soft", x: x + 150, y: y + 4 }, `${one.turns} turns, ${one.stop}${one.branch === null ? "" : `, branched off attempt ${one.branch}`}`)));
  }
  return h("div", { class: "panel tree" }, box);
}

export { percent };
