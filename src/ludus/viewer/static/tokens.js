// The token view: what exactly was read, sampled and trained on, and how hard.

import { get, place } from "./api.js";
import { announce, clear, h, number, plain, said } from "./dom.js";

const MODES = [["kind", "Origin"], ["logprob", "Log-probability"], ["advantage", "Advantage"], ["entropy", "Entropy"], ["version", "Policy version"]];

export async function tokenView(body, episode, state, remember) {
  let data = null, offset = 0, sequence = Number(state.sequence || 0);
  const load = async () => { data = await get(`/api/tokens/${place(episode)}`, { sequence, offset }); draw(); };
  const values = (segment, mode) => ({ logprob: segment.logprobs, advantage: segment.advantages, entropy: segment.entropies }[mode]);
  const draw = () => {
    const mode = state.colour || "kind";
    const all = data.segments.flatMap((one) => values(one, mode) || []).filter((one) => one !== null);
    const most = mode === "version" ? 1 : Math.max(...all.map(Math.abs), 1e-9);
    const versions = [...new Set(data.segments.flatMap((one) => one.versions.map(([, version]) => version)))].sort((a, b) => a - b);
    const tip = h("div", { class: "tip", hidden: true });
    const area = h("div", { class: "tokens", style: { position: "relative" } }, data.segments.map((segment) => segmentView(segment, mode, most, versions, data)), tip);
    const facts = (token) => {
      const [part, n] = token.dataset.at.split(":").map(Number), segment = data.segments[part];
      const version = segment.versions.filter(([start]) => start <= segment.start + n).at(-1)?.[1];
      const line = (name, value) => value !== null && value !== undefined && h("div", { class: "line" }, h("span", {}, name), h("b", {}, value));
      clear(tip, h("b", {}, segment.texts ? JSON.stringify(plain(segment.texts[n])) : `token ${segment.ids[n]}`), line("id", segment.ids[n]), line("place", segment.start + n), line("origin", segment.kind),
        segment.logprobs && line("log-probability", number(segment.logprobs[n], 4)), segment.logprobs && segment.logprobs[n] !== null && line("probability", `${(100 * Math.exp(segment.logprobs[n])).toFixed(2)}%`),
        line("advantage", segment.advantages ? number(segment.advantages[n], 4) : segment.kind === "action" ? "not trained on" : null), segment.entropies && line("entropy", `${number(segment.entropies[n], 4)} nats`), version !== undefined && line("policy version", version));
      tip.hidden = false;
      const frame = area.getBoundingClientRect(), box = token.getBoundingClientRect();
      tip.style.left = `${Math.max(0, Math.min(box.left - frame.left, frame.width - 260))}px`;
      tip.style.top = `${box.bottom - frame.top + 6}px`;
    };
    let pinned = null;
    area.addEventListener("pointerover", (event) => { if (!pinned && event.target.classList.contains("tok")) facts(event.target); });
    area.addEventListener("pointerleave", () => { if (!pinned) tip.hidden = true; });
    area.addEventListener("click", (event) => {
      if (!event.target.classList.contains("tok")) return;
      pinned?.classList.remove("pinned");
      pinned = pinned === event.target ? null : event.target;
      if (pinned) { pinned.classList.add("pinned"); facts(pinned); announce(tip.textContent); } else tip.hidden = true;
    });
    area.addEventListener("focusin", (event) => { if (event.target.classList.contains("tok")) facts(event.target); });
    area.addEventListener("keydown", (event) => {
      const now = document.activeElement;
      if (!now.classList?.contains("tok") || !["ArrowRight", "ArrowLeft"].includes(event.key)) return;
      event.preventDefault(); event.stopPropagation();
      const tokens = [...area.querySelectorAll(".tok")], next = tokens[tokens.indexOf(now) + (event.key === "ArrowRight" ? 1 : -1)];
      next?.focus(); if (next) announce(tip.textContent);
    });
    const shown = data.segments.reduce((sum, one) => sum + one.ids.length, 0);
    clear(body,
      h("div", { class: "row" }, h("span", { class: "soft" }, "Colour by"), MODES.map(([key, title]) => h("button", { class: "button", type: "button", "aria-pressed": mode === key ? "true" : "false", onclick: () => { state.colour = key; remember({ colour: key }); draw(); } }, title)), scale(mode, most, versions, all.length)),
      data.sequences.length > 1 && h("div", { class: "row" }, h("span", { class: "soft" }, "Thread"), data.sequences.map((one, n) => h("button", { class: "button", type: "button", "aria-pressed": n === sequence ? "true" : "false", onclick: () => { sequence = n; offset = 0; remember({ sequence: n }); load(); } }, `${n + 1}${one.parent ? ` ↳ ${one.parent[0] + 1}` : ""} · ${one.turns} turns`))),
      !data.decoded && h("p", { class: "soft small" }, "The run has no checkpoint with a tokenizer: ids are shown instead of texts."),
      data.shared > 0 && h("p", { class: "soft small" }, `A branch: its first ${data.shared} segments are another attempt's, and were trained there.`),
      h("div", { class: "panel" }, area),
      data.tokens > shown && h("div", { class: "pager" }, h("span", { class: "soft" }, `tokens ${number(offset + 1)}–${number(offset + shown)} of ${number(data.tokens)}`), h("button", { class: "button", type: "button", disabled: offset === 0, onclick: () => { offset = Math.max(0, offset - 4000); load(); } }, "← Earlier"), h("button", { class: "button", type: "button", disabled: offset + shown >= data.tokens, onclick: () => { offset += shown; load(); } }, "Later →")));
  };
  clear(body, h("p", { class: "soft" }, "Reading tokens…"));
  await load();
}

function segmentView(segment, mode, most, versions, data) {
  const list = { logprob: segment.logprobs, advantage: segment.advantages, entropy: segment.entropies }[mode];
  const part = data.segments.indexOf(segment);
  const trained = segment.kind === "action" ? (segment.advantages ? "trained on" : "not trained on") : "read, never trained on";
  const mean = segment.advantages ? segment.advantages.reduce((a, b) => a + b, 0) / segment.advantages.length : null;
  return h("div", { class: `segment ${segment.kind}` },
    h("span", { class: "label" }, `${segment.kind}${segment.turn === null ? "" : ` · turn ${segment.turn + 1}`} · ${segment.ids.length} tokens · ${trained}${mean === null ? "" : ` · mean advantage ${mean > 0 ? "+" : ""}${number(mean)}`}`),
    segment.ids.map((id, n) => {
      const token = h("span", { class: `tok ${mode === "kind" ? "kind" : ""}`, "data-at": `${part}:${n}`, tabindex: n === 0 ? 0 : -1 }, segment.texts ? said(segment.texts[n].replaceAll("\n", "⏎\n")) : `${id} `);
      const back = background(mode, list ? list[n] : null, most, segment, n, versions);
      if (back) token.style.background = back;
      return token;
    }));
}

function background(mode, value, most, segment, n, versions) {
  if (mode === "version") {
    const version = segment.versions.filter(([start]) => start <= segment.start + n).at(-1)?.[1];
    return version === undefined ? "" : `color-mix(in srgb, var(--c${versions.indexOf(version) % 8}) 34%, transparent)`;
  }
  if (value === null || value === undefined) return "";
  const share = Math.min(1, Math.abs(value) / most) * 62 + (value === 0 ? 0 : 6);
  const tone = mode === "advantage" ? (value > 0 ? "--good" : "--bad") : mode === "logprob" ? "--c2" : "--c4";
  return value === 0 && mode === "advantage" ? "var(--sunken)" : `color-mix(in srgb, var(${tone}) ${share.toFixed(0)}%, transparent)`;
}

function scale(mode, most, versions, known) {
  if (mode === "kind") return h("span", { class: "row small" }, [["prompt", "--prompt"], ["action", "--action"], ["observation", "--observation"]].map(([name, tone]) => h("span", { class: "chip", style: { background: `var(${tone})`, color: "var(--text)" } }, name)));
  if (mode === "version") return h("span", { class: "row small" }, versions.map((one, n) => h("span", { class: "chip", style: { background: `color-mix(in srgb, var(--c${n % 8}) 34%, transparent)`, color: "var(--text)" } }, `version ${one}`)));
  if (!known) return h("span", { class: "chip warn" }, `no ${mode} was recorded: not a training episode, or of an older version`);
  const [from, to] = { logprob: ["var(--bg)", "var(--c2)"], entropy: ["var(--bg)", "var(--c4)"], advantage: ["var(--bad)", "var(--good)"] }[mode];
  const ends = { logprob: ["certain", `${number(-most, 2)} nats`], entropy: ["0", `${number(most, 2)} nats`], advantage: [number(-most, 2), `+${number(most, 2)}`] }[mode];
  return h("span", { class: "scale" }, ends[0], h("span", { class: "ramp", style: { background: `linear-gradient(90deg, ${from}, ${mode === "advantage" ? "var(--sunken), " : ""}${to})` } }), ends[1]);
}
