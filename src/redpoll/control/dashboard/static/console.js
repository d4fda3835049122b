// The debug console: a client of this server that is subscribed to a channel that only the dashboard can join.
(() => {
  "use strict";

  const MAX_ROWS = 500;
  const WATCH_MS = 30000;
  // The session has ended, or belongs to another login.
  const SESSION_ENDED = [401, 403];
  const AGAIN_MS = 600_000;
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23" });

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("console");
    if (!root) return;
    const by = (id) => document.getElementById(id);
    const list = by("console-list");
    const headers = { "X-CSRF-Token": root.dataset.csrf };
    const DRAFT_KEY = `redpoll-publish ${root.dataset.base}`;
    let seen = 0;
    let paused = false;
    let waiting = [];
    let drawing = false;

    // -- incoming events

    function matches({ channel, event }) {
      return channel.includes(by("only-channel").value.trim()) && event.includes(by("only-event").value.trim());
    }

    function pretty(text) {
      try {
        return JSON.stringify(JSON.parse(text), null, 2);
      } catch {
        return text;
      }
    }

    function create(tag, text, kind) {
      const element = document.createElement(tag);
      if (text !== undefined) element.textContent = text;
      if (kind) element.className = kind;
      return element;
    }

    function link(text, href) {
      const element = create("a", text);
      element.href = href;
      return element;
    }

    function row({ message, at }) {
      const details = create("details");
      details.dataset.channel = message.channel;
      details.dataset.event = message.event;
      const summary = create("summary");
      summary.append(create("span", clock.format(at), "when"), create("span", message.channel), create("span", message.event, "what"), create("span", message.data, "data"));
      details.append(summary);
      details.addEventListener("toggle", () => {
        if (!details.open || details.children.length > 1) return;
        const from = message.user_id ? `from user ${message.user_id}\n` : message.event.startsWith("client-") ? "from a client\n" : "";
        details.append(create("pre", `${from}${pretty(message.data)}`, "payload"));
      });
      details.hidden = !matches(message);
      return details;
    }

    function draw() {
      drawing = false;
      const rows = waiting.map(row).reverse();
      waiting = [];
      list.prepend(...rows);
      // The limit applies to shown and hidden rows separately, so that hidden rows don't push out shown ones.
      const counts = { true: 0, false: 0 };
      for (const element of [...list.children]) {
        counts[element.hidden] += 1;
        if (counts[element.hidden] > MAX_ROWS) element.remove();
      }
      say();
    }

    function say() {
      const any = list.children.length > 0;
      list.hidden = !any;
      by("console-empty").hidden = any;
      const shown = [...list.children].filter((element) => !element.hidden).length;
      by("console-count").textContent = seen ? `${seen.toLocaleString()} received${paused ? ", paused" : ""}; ${shown.toLocaleString()} shown` : "No events yet";
    }

    function received(message) {
      seen += 1;
      if (paused) return;
      waiting.push({ message, at: new Date() });
      if (waiting.length > MAX_ROWS) waiting.splice(Math.max(0, waiting.findIndex((item) => !matches(item.message))), 1);
      if (!drawing) {
        drawing = true;
        requestAnimationFrame(draw);
      }
    }

    // -- the connection to the server

    const pusher = new Pusher(root.dataset.key, {
      cluster: "mt1",
      wsHost: root.dataset.host,
      wsPort: Number(root.dataset.port),
      wssPort: Number(root.dataset.port),
      forceTLS: root.dataset.tls === "1",
      enabledTransports: ["ws", "wss"],
      disableStats: true,
      channelAuthorization: { transport: "ajax", endpoint: `${root.dataset.base}/auth`, headers },
    });
    const channel = pusher.subscribe(root.dataset.channel);
    const state = (text, kind) => {
      by("console-state").textContent = text;
      by("console-dot").className = `dot ${kind}`;
    };
    const here = location.pathname + location.search;
    let isLeaving = false;
    function leave() {
      isLeaving = true;
      pusher.disconnect();
      isLeaving = false;
    }
    // Saves the publish form, to restore it when the page is loaded again.
    function stop(text, label, href) {
      state(text, "off");
      by("console-state").append(link(label, href));
      clearInterval(renewing);
      leave();
      if (by("publish")) sessionStorage.setItem(DRAFT_KEY, JSON.stringify([...new FormData(by("publish"))]));
    }
    const ended = () => stop("Your session has ended. ", "Log in again", `/dashboard/login?next=${encodeURIComponent(here)}`);
    // Asks the server to go on copying events to the console's channel; `socketId` keeps its subscription.
    async function renew(socketId) {
      const body = new URLSearchParams({ socket_id: socketId });
      const answer = await fetch(`${root.dataset.base}/watch`, { method: "POST", headers, body }).catch(() => null);
      if (!answer || !SESSION_ENDED.includes(answer.status)) return true;
      ended();
      return false;
    }
    // pusher-js doesn't connect again after such an end, such as of an app that was disabled. The server says why before it.
    let reason = "no reason was given";
    pusher.connection.bind("error", ({ data, error }) => (reason = (data ?? error?.data)?.message || reason));
    pusher.connection.bind("state_change", ({ current }) => {
      if (current === "disconnected" && !isLeaving) stop(`The server refuses this view: ${reason}. `, "Reload", here);
      else if (current === "connecting") state("Connecting…", "");
      else if (current !== "connected" && current !== "disconnected") state(`Not connected (${current})`, "off");
    });
    channel.bind("pusher:subscription_succeeded", () => state("Live", "on"));
    // The server ends the subscriptions that it knows nothing of, such as after its restart. On a new connection the page's
    // session is asked for again. Not again and again: a login has room for some consoles only, and one that comes back ends
    // another.
    let refusedAt = -Infinity;
    channel.bind("pusher:subscription_error", async (fault) => {
      const isAgain = performance.now() - refusedAt < AGAIN_MS;
      refusedAt = performance.now();
      if (!SESSION_ENDED.includes(fault.status)) state(`Refused: ${fault.error || fault.status}`, "off");
      else if (isAgain) {
        if (await renew("")) stop("The server has ended this view. ", "Reload", here);
      } else {
        leave();
        pusher.connect();
      }
    });
    channel.bind("event", received);
    // The server copies events to this channel only while the dashboard keeps asking for them.
    const renewing = setInterval(() => renew(pusher.connection.socket_id || ""), WATCH_MS);

    // -- controls

    for (const id of ["only-channel", "only-event"]) {
      by(id).addEventListener("input", () => {
        for (const element of list.children) element.hidden = !matches(element.dataset);
        say();
      });
    }
    by("console-pause").addEventListener("click", (event) => {
      paused = !paused;
      event.target.textContent = paused ? "Resume" : "Pause";
      event.target.setAttribute("aria-pressed", paused);
      say();
    });
    by("console-clear").addEventListener("click", () => {
      list.replaceChildren();
      seen = 0;
      say();
    });
    say();

    // -- publishing

    const form = by("publish");
    if (!form) return;
    for (const [name, value] of JSON.parse(sessionStorage.getItem(DRAFT_KEY) ?? "[]")) if (form.elements[name]) form.elements[name].value = value;
    sessionStorage.removeItem(DRAFT_KEY);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const status = by("publish-state");
      for (const old of form.querySelectorAll(".fault")) old.remove();
      for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
      status.textContent = "Publishing…";
      try {
        const answer = await fetch(`${root.dataset.base}/publish`, { method: "POST", headers, body: new URLSearchParams(new FormData(form)) });
        const result = answer.headers.get("Content-Type")?.startsWith("application/json") ? await answer.json() : {};
        if (answer.ok && !result.fault && !answer.redirected) {
          status.textContent = "Published. ";
          status.append(link("Trace", `${root.dataset.trace}?trace_id=${result.trace_id}`));
          return;
        }
        // It may be refused for another reason: a viewer publishes nothing.
        if (SESSION_ENDED.includes(answer.status) && !(await renew(pusher.connection.socket_id || ""))) {
          status.textContent = "Not published: your session has ended. ";
          status.append(link("Log in again", `/dashboard/login?next=${encodeURIComponent(location.pathname)}`));
          return;
        }
        status.textContent = result.fault ? "" : `Not published: ${result.error || answer.status}`;
        for (const [name, text] of Object.entries(result.fault ?? {})) {
          const field = form.elements[name];
          if (!field) {
            status.textContent = text;
            continue;
          }
          const fault = create("p", text, "fault");
          fault.id = `fault-${name}`;
          field.setAttribute("aria-invalid", "true");
          field.setAttribute("aria-describedby", fault.id);
          field.after(fault);
          field.focus();
        }
      } catch {
        status.textContent = "The server doesn't respond.";
      }
    });
  });
})();
