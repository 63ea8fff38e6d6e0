// Play by hand: the tools that the model has, one action at a time; or let the checkpoint go on.

import { get, post } from "./api.js";
import { announce, clear, h, number, plain, toast } from "./dom.js";
import { messageView, renderView } from "./message.js";

export async function playPage(context) {
  context.title("Play");
  const room = await get("/api/play");
  if (context.isOver()) return;
  const tasks = room.sets.flatMap((set) => set.tasks.map((task) => ({ ...task, set: set.name })));
  const board = h("div", { class: "stack" });
  const choice = h("select", { class: "input", "aria-label": "Task", style: { "max-width": "560px" } }, tasks.map((task, n) => h("option", { value: n }, `${task.set} · ${task.split} · ${plain(task.id)} — ${plain(task.prompt).slice(0, 80)}`)));
  const begin = async () => { const task = tasks[Number(choice.value)]; try { draw(await post("/api/play/start", { set: task.set, split: task.split, number: task.number })); } catch (error) { toast(error.message); } };
  clear(context.frame, h("div", { class: "spread" }, h("div", {}, h("h1", {}, `Play ${plain(room.name)}`), h("p", { class: "soft" }, "You act through the very tools, budgets and rewards that the model has. ", room.is_untrained ? "The recipe's own model is untrained: give a run's folder to let a checkpoint take over." : `Checkpoint: ${plain(room.model)}`))),
    h("div", { class: "row" }, choice, h("button", { class: "button primary", type: "button", onclick: begin, disabled: !tasks.length }, "Start")), board);
  let state = null, busy = false;
  const act = async (move) => {
    if (busy || !state) return;
    busy = true; board.setAttribute("aria-busy", "true");
    try { draw(await post(`/api/play/${state.id}/move`, move)); announce(state.is_over ? `over, reward ${state.episode?.reward}` : "your turn"); }
    catch (error) { toast(error.message); }
    finally { busy = false; board.removeAttribute("aria-busy"); }
  };
  const draw = (now) => {
    state = now;
    const episode = now.episode, media = { always: true, url: (sha256) => `/api/play/${now.id}/media/${sha256}` };
    const shown = episode ? episode.messages.map((one) => messageView(one, { turn: episode.turns[one.turn] ?? null, number: one.turn ?? undefined, media })) : [];
    const renders = episode ? episode.renders.filter((one) => one.turn === Math.max(...episode.renders.map((other) => other.turn))) : [];
    clear(board, now.problem && h("div", { class: "error-box", role: "alert" }, plain(now.problem)),
      h("div", { class: "episode" }, h("div", { class: "messages" }, shown, now.is_over && over(now, episode)), h("aside", { class: "rail", "aria-label": "What you can do" },
        renders.length > 0 && h("div", { class: "panel" }, renders.map((one) => renderView(one, media))),
        !now.is_over && h("div", { class: "panel stack", style: { gap: "12px" } }, h("div", { class: "spread" }, h("h2", {}, "Your action"), h("span", { class: "soft small" }, `${now.turns_left} turns left`)), now.tools.map((tool) => toolForm(tool, act)), answerForm(act)),
        !now.is_over && h("div", { class: "panel stack", style: { gap: "10px" } }, h("h2", {}, "Let the model go on"), h("div", { class: "row" }, h("button", { class: "button", type: "button", id: "model-turn", onclick: () => act({ kind: "model", turns: 1 }) }, "One turn"), h("button", { class: "button", type: "button", id: "model-all", onclick: () => act({ kind: "model", turns: 1000 }) }, "To the end"))))));
    board.querySelector(".message:last-of-type")?.scrollIntoView({ block: "nearest" });
  };
  const over = (now, episode) => h("div", { class: "panel stack", style: { gap: "10px" } }, h("div", { class: "spread" }, h("div", {}, h("h2", {}, episode?.failure ? "It was lost" : "The episode is over"), h("p", { class: "soft" }, episode?.failure ? plain(episode.failure.message) : plain(episode?.stop ?? ""))), h("span", { class: "big" }, episode ? number(episode.reward) : "–")),
    episode && h("div", { class: "row" }, episode.rewards.map(([name, value]) => h("span", { class: "chip" }, `${plain(name)} ${number(value)}`))),
    h("div", { class: "row" }, h("button", { class: "button", type: "button", id: "save-good", onclick: async () => { try { await post(`/api/play/${now.id}/save`, { label: true }); toast("Kept as a demonstration (labels/good.jsonl)"); } catch (error) { toast(error.message); } } }, "✓ Keep as a demonstration"), h("button", { class: "button", type: "button", onclick: begin }, "Again")));
}

function toolForm(tool, act) {
  const fields = Object.entries(tool.parameters.properties || {});
  const inputs = fields.map(([name, schema]) => {
    const options = schema.enum || schema.anyOf?.find((one) => one.enum)?.enum;
    const made = options ? h("select", { "aria-label": name }, options.map((one) => h("option", { value: JSON.stringify(one) }, String(one)))) : schema.type === "string" && /code|text|content|query/.test(name) ? h("textarea", { class: "input", "aria-label": name }) : h("input", { type: schema.type === "integer" || schema.type === "number" ? "number" : "text", step: "any", "aria-label": name });
    return [name, schema, made, Boolean(options)];
  });
  const send = (event) => {
    event.preventDefault();
    const found = {};
    for (const [name, schema, made, isChoice] of inputs) {
      if (made.value === "" && !(tool.parameters.required || []).includes(name)) continue;
      if (isChoice) found[name] = JSON.parse(made.value);
      else if (schema.type === "integer" || schema.type === "number") found[name] = Number(made.value);
      else if (schema.type === "string") found[name] = made.value;
      else { try { found[name] = JSON.parse(made.value); } catch { found[name] = made.value; } }
    }
    act({ kind: "call", name: tool.name, arguments: found });
  };
  return h("form", { class: "call", onsubmit: send, "aria-label": `call ${tool.name}` }, h("div", { class: "name" }, plain(tool.name)), h("div", { style: { padding: "10px 12px", display: "grid", gap: "8px" } }, h("p", { class: "small soft" }, plain(tool.description).split("\n")[0]), inputs.map(([name, schema, made]) => h("label", { class: "field" }, plain(name), made)), h("div", {}, h("button", { class: "button", type: "submit" }, `Call ${plain(tool.name)}`))));
}

function answerForm(act) {
  const text = h("textarea", { class: "input", "aria-label": "Your text", placeholder: "An answer, or an action written as the model would write it" });
  return h("form", { onsubmit: (event) => { event.preventDefault(); if (text.value) act({ kind: "say", content: text.value }); }, style: { display: "grid", gap: "8px" } }, h("label", { class: "field" }, "Say", text), h("div", {}, h("button", { class: "button", type: "submit" }, "Say it")));
}
