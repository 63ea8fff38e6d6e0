// One message of a conversation, and what belongs to its turn. Used by replay, comparison and play.

import { get, place } from "./api.js";
import { clear, duration, h, number, plain, said } from "./dom.js";

const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>\s*|$)([\s\S]*)$/;
const CALLS = /\s*<tool_call>[\s\S]*?(<\/tool_call>|$)/g;

export function messageView(message, { turn, number: turnNumber, episode, media, id } = {}) {
  const content = message.content;
  const thought = message.role === "assistant" ? content.match(THOUGHT) : null;
  let text = thought ? thought[2] : content;
  const good = message.calls.length > 0 && message.calls.every((one) => !one.fault);
  if (good && !turn?.faults.length) text = text.replace(CALLS, "").trimEnd();
  const body = h("pre", { dir: "auto" }, said(text));
  const rest = message.chars - content.length;
  const faults = turn ? turn.faults : [];
  return h("article", { class: `message ${message.role}`, id, "aria-label": turnNumber === undefined ? message.role : `turn ${turnNumber + 1}, ${message.role}` },
    h("header", {},
      h("b", {}, message.role === "tool" ? plain(message.name || "tool") : message.role), message.role === "tool" && h("span", {}, "result"),
      turnNumber !== undefined && h("span", {}, `turn ${turnNumber + 1}`),
      turn && turn.reward !== null && h("span", { class: `chip ${turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : ""}` }, `reward ${number(turn.reward)}`),
      turn && turn.advantage !== null && h("span", { class: `chip ${turn.advantage > 0 ? "good" : turn.advantage < 0 ? "bad" : ""}`, title: "mean advantage of its tokens" }, `advantage ${turn.advantage > 0 ? "+" : ""}${number(turn.advantage, 2)}`),
      turn && h("span", {}, `${turn.tokens} tokens`), turn && turn.seconds > 0 && h("span", {}, duration(turn.seconds)),
      turn && turn.finish === "length" && h("span", { class: "chip warn" }, "cut at its length"),
      faults.map((one) => h("span", { class: "chip bad" }, `${one.tool ? `${plain(one.tool)}: ` : ""}${plain(one.fault.replaceAll("_", " "))}`))),
    thought && h("details", { class: "thought", open: true }, h("summary", {}, "Thought"), h("pre", { dir: "auto" }, said(thought[1].trim()))),
    (text || (!message.calls.length && !thought)) && body,
    rest > 0 && more(message, body, episode, rest),
    message.calls.map(callView),
    message.media.map((one) => picture(one, media)));
}

function more(message, body, episode, rest) {
  const made = h("button", { class: "button", type: "button", style: { "margin-top": "8px" } }, `Show ${rest.toLocaleString("en-US")} more characters`);
  let offset = message.content.length;
  if (!episode) { made.disabled = true; return made; }
  made.addEventListener("click", async () => {
    made.disabled = true;
    const found = await get(`/api/text/${place(episode)}`, { message: message.number, offset });
    body.append(said(found.text));
    offset += found.text.length;
    if (offset >= found.chars || !found.text.length) made.remove();
    else { made.disabled = false; clear(made, `Show ${(found.chars - offset).toLocaleString("en-US")} more characters`); }
  });
  return made;
}

export function callView(call) {
  return h("div", { class: `call ${call.fault ? "fault" : ""}` },
    h("div", { class: "name" }, plain(call.name || "(no name)"), call.fault && h("span", { class: "chip bad" }, plain(call.fault.replaceAll("_", " ")))),
    call.arguments.length > 0 && h("dl", {}, call.arguments.flatMap(([name, value]) => [h("dt", {}, plain(name)), h("dd", {}, h("pre", { dir: "auto" }, said(value)))])),
    call.problem && h("p", { class: "small", style: { padding: "0 12px 10px", color: "var(--bad)" } }, plain(call.problem)));
}

export function picture(one, media) {
  const url = media && (one.kept || media.always) ? media.url(one.sha256) : null;
  return url ? h("p", { class: "render" }, h("img", { src: url, alt: `picture (${plain(one.kind)})`, loading: "lazy" })) : h("span", { class: "chip" }, `${plain(one.kind)} ${one.sha256.slice(0, 10)}, not kept`);
}

export function renderView(render, media) {
  if (render.picture) return h("div", { class: "render" }, picture(render.picture, media));
  return h("div", { class: "render" }, h("pre", {}, said(render.text)));
}
