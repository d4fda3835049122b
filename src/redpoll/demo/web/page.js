// The frame of the page of `redpoll demo`: ends processes of the server, and says what the page's users notice. The
// examples run beside it and don't know it; it watches their connections (Pusher.instances) from outside.

const NAMES = { "presence-demo-chat": "chat", "presence-demo-cursors": "cursors", "demo-ticker": "ticker", "demo-text": "text" };
// After a kill, so long is watched at least.
const WATCH_MS = 3000;

const state = document.getElementById("state");
const noticed = document.getElementById("noticed");
const buttons = [...document.querySelectorAll("[data-kill]")];
// The names of examples whose connection is lost, with the time when it was.
const lost = new Map();
// What was numbered: how many numbers are missing up to now.
const numbered = { ticker: counter(), text: counter() };
let kill = null;

function counter() {
  return { last: null, missing: 0, lastAt: 0, longestMs: 0 };
}

function count(of, n) {
  if (!Number.isInteger(n)) return; // published from a shell
  const now = performance.now();
  if (of.last !== null) {
    if (n <= of.last) return;
    of.missing += n - of.last - 1;
    of.longestMs = Math.max(of.longestMs, now - of.lastAt);
  }
  of.last = n;
  of.lastAt = now;
}

function say(sentence, good = false) {
  const line = document.createElement("p");
  const time = document.createElement("time");
  time.textContent = new Date().toTimeString().slice(0, 8);
  line.append(time, sentence);
  if (good) line.className = "good";
  noticed.append(line);
  if (noticed.children.length > 100) noticed.firstElementChild.remove();
  noticed.scrollTop = noticed.scrollHeight;
}

const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;

function showState() {
  const all = Pusher.instances.length;
  const up = Pusher.instances.filter(({ connection }) => connection.state === "connected").length;
  state.textContent = up === all ? `All ${all} examples are connected.` : `${up} of ${all} examples are connected.`;
}

function watch(pusher) {
  const name = NAMES[Object.keys(pusher.channels.channels)[0]];
  pusher.connection.bind("state_change", ({ previous, current }) => {
    if (previous === "connected") {
      lost.set(name, performance.now());
      kill?.lost.add(name);
      say(`${name}: the connection is lost`);
    } else if (current === "connected" && lost.has(name)) {
      const away = performance.now() - lost.get(name);
      lost.delete(name);
      if (kill) kill.longestMs = Math.max(kill.longestMs, away);
      say(`${name}: connected again after ${seconds(away)}`);
    }
    showState();
  });
  pusher.bind("pusher:error", ({ message }) => say(`${name}: the server says: ${message}`));
  pusher.channel("demo-ticker")?.bind("price", ({ n }) => { count(numbered.ticker, n); review(); });
  pusher.channel("demo-text")?.bind("begin", () => { numbered.text = Object.assign(counter(), { last: 0 }); });
  pusher.channel("demo-text")?.bind("word", ({ n }) => count(numbered.text, n));
}

// A price comes every second, so this is called often.
function review() {
  if (!kill || lost.size || performance.now() - kill.at < WATCH_MS) return;
  const missing = numbered.ticker.missing - kill.prices + Math.max(0, numbered.text.missing - kill.words);
  const connections = kill.lost.size
    ? `${kill.lost.size} of ${Pusher.instances.length} connections were lost for at most ${seconds(kill.longestMs)}`
    : "No connection was lost";
  const pause = numbered.ticker.longestMs > 2000 ? `, prices paused for ${seconds(numbered.ticker.longestMs)}` : "";
  say(`${connections}${pause}; ${missing ? `${missing} messages are missing` : "no price and no word is missing"}.`, !missing);
  kill = null;
  for (const button of buttons) button.disabled = false;
}

async function end(what) {
  for (const button of buttons) button.disabled = true;
  numbered.ticker.longestMs = 0;
  const prices = numbered.ticker.missing, words = numbered.text.missing;
  kill = { at: performance.now(), lost: new Set(), longestMs: 0, prices, words };
  const answer = await fetch("kill", { method: "POST", body: new URLSearchParams({ what }) }).catch(() => null);
  const text = answer ? await answer.text() : "the back end of the demo doesn't answer";
  say(text);
  if (!answer?.ok) {
    kill = null;
    for (const button of buttons) button.disabled = false;
  }
}

for (const button of buttons) button.addEventListener("click", () => end(button.dataset.kill));

// The examples are modules that run after this one.
addEventListener("DOMContentLoaded", () => {
  for (const pusher of Pusher.instances) watch(pusher);
  showState();
});
