// The live bars: asks /ranks once a second and shows what happened between two answers.
// Knows nothing of the chat.

import { call } from "./api.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 5000;
const HISTORY = 60; // points of the curve, one a second
const MANY_REQUESTS = 8; // a full bar is at least so many requests, or tokens/s
const MANY_TOKENS = 50;

const byId = (id) => document.getElementById(id);

// What each rank did between two answers of /ranks. Null is "not known": no earlier answer, a
// counter that went back because the rank was started anew, or no step to take a share of.
export function rates(before, after) {
  const earlier = new Map((before?.ranks ?? []).map((rank) => [rank.rank, rank]));
  const seconds = after.time - (before?.time ?? after.time);
  return after.ranks.map((now) => {
    const then = earlier.get(now.rank);
    const usable = then && seconds > 0 && now.steps >= then.steps;
    const tokens = usable ? now.generation_tokens - then.generation_tokens : null;
    const parts = usable ? stepSeconds(then, now) : {};
    const total = Object.values(parts).reduce((sum, part) => sum + part, 0);
    return {
      rank: now.rank,
      running: now.running,
      waiting: now.waiting,
      cache: now.kv_cache_usage,
      tokens: tokens === null ? null : tokens / seconds,
      vote: total > 0 ? (parts.vote ?? 0) / total : null,
      drafts: drafts(now),
      restored: restored(now),
    };
  });
}

function stepSeconds(then, now) {
  const parts = Object.entries(now.step_seconds);
  return Object.fromEntries(parts.map(([name, value]) => [name, value - (then.step_seconds[name] ?? 0)]));
}

export class Ranks {
  // onState(error or null) is told after every question how the server is.
  constructor(onState) {
    this.onState = onState;
    this.before = null;
    this.rows = new Map(); // rank -> its <li>
    this.history = [];
    this.timer = 0;
    this.busiest = MANY_TOKENS; // tokens/s of a full bar, the same for all ranks
    document.addEventListener("visibilitychange", () => this.schedule(0));
  }

  schedule(delay = PERIOD_MS) {
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), delay);
  }

  async poll() {
    let failure = null;
    try {
      const answer = await call("ranks", { signal: AbortSignal.timeout(TIMEOUT_MS) });
      const now = await answer.json();
      this.show(rates(this.before, now));
      byId("group-state").textContent = now.groups.map(groupState).join("; ");
      this.before = now;
    } catch (error) {
      failure = error.name === "TimeoutError" ? new Error("The ranks do not answer.") : error;
      this.before = null;
    }
    byId("ranks-note").hidden = !failure;
    byId("ranks-note").textContent = failure?.message ?? "";
    byId("ranks").toggleAttribute("data-stale", failure !== null);
    this.onState(failure);
    this.schedule();
  }

  show(found) {
    const known = found.filter((rank) => rank.tokens !== null);
    this.busiest = Math.max(MANY_TOKENS, this.busiest * 0.98, ...known.map((rank) => rank.tokens));
    const most = Math.max(MANY_REQUESTS, ...found.map((rank) => rank.running + rank.waiting));
    for (const [rank, row] of this.rows) {
      if (!found.some((it) => it.rank === rank)) row.remove();
    }
    this.rows = new Map(found.map((it) => [it.rank, this.rows.get(it.rank) ?? newRow(it.rank)]));
    for (const it of found) this.fill(this.rows.get(it.rank), it, most);
    const [running, waiting] = ["running", "waiting"].map((name) => found.reduce((sum, it) => sum + it[name], 0));
    byId("load").textContent = requests(running, waiting);
    if (known.length) this.showTotal(known.reduce((sum, rank) => sum + rank.tokens, 0));
  }

  fill(row, it, most) {
    const text = (name, value) => (row.querySelector(name).textContent = value);
    text(".tokens", it.tokens === null ? "" : `${whole(it.tokens)} tok/s`);
    text(".requests", requests(it.running, it.waiting));
    text(".cache", percent(it.cache));
    text(".vote", it.vote === null ? "\u2013" : percent(it.vote));
    for (const name of ["drafts", "restored"]) {
      text(`.${name}`, it[name]);
      row.querySelector(`.${name}`).parentElement.hidden = !it[name];
    }
    bar(row, "tokens", (it.tokens ?? 0) / this.busiest);
    bar(row, "requests", it.running / most, it.waiting / most);
    bar(row, "cache", it.cache);
    bar(row, "vote", it.vote ?? 0);
  }

  showTotal(tokens) {
    byId("total").textContent = whole(tokens);
    this.history = [...this.history, tokens].slice(-HISTORY);
    const top = Math.max(MANY_TOKENS, ...this.history);
    const start = HISTORY - this.history.length;
    const points = this.history.map((value, i) => `${start + i + 1} ${(19 - (value / top) * 18).toFixed(2)}`);
    byId("line").setAttribute("d", `M${points.join("L")}`);
    byId("area").setAttribute("d", `M${start + 1} 20L${points.join("L")}L${HISTORY} 20Z`);
  }
}

function newRow(rank) {
  const row = byId("rank-template").content.cloneNode(true).querySelector("li");
  row.querySelector(".name").textContent = `rank ${rank}`;
  byId("rank-list").append(row);
  return row;
}

function bar(row, kind, ...shares) {
  const parts = row.querySelector(`[data-kind=${kind}]`).children;
  shares.forEach((share, i) => (parts[i].style.width = `${Math.min(1, share) * 100}%`));
}

function groupState({ role, state, seconds, epoch, rebuilds, slow_ranks: slow }) {
  const [size, unit] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"];
  const held = slow.map((rank) => `, rank ${rank} is slow`).join("");
  const part = role === "generate" ? "" : `${role}: `;
  return `${part}${state} for ${whole(seconds / size)} ${unit}, epoch ${epoch}, ${rebuilds} rebuild${rebuilds === 1 ? "" : "s"}${held}`;
}

// Since the start; empty without drafts, and without KV outside the device.
const drafts = ({ draft_tokens: all, accepted_tokens: accepted }) =>
  all ? `${percent(accepted / all)} of ${whole(all)} accepted` : "";

const restored = ({ kv_waiting: waiting, kv_restored_host: host, kv_restored_disk: disk }) =>
  waiting === null ? "" : `${whole(host)} host, ${whole(disk)} disk${waiting ? `, ${waiting} waiting` : ""}`;

const requests = (running, waiting) => (waiting ? `${running} + ${waiting} queued` : `${running} running`);

const whole = (value) => Math.round(value).toLocaleString("en");

// Two digits where they matter: a nearly empty cache is not empty.
function percent(share) {
  const value = share * 100;
  return value > 0 && value < 9.95 ? `${value.toFixed(1)} %` : `${Math.round(value)} %`;
}
