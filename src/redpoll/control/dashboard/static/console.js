// The debug console: a client of the very server that it shows, on a channel that only the dashboard may join.
(() => {
  "use strict";

  const KEPT = 500;
  const WATCH_MS = 30000;
  // No session any more, or that of another login.
  const GONE = [401, 403];
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23" });

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("console");
    if (!root) return;
    const by = (id) => document.getElementById(id);
    const list = by("console-list");
    const headers = { "X-CSRF-Token": root.dataset.csrf };
    const KEPT_BOX = `redpoll-publish ${root.dataset.base}`;
    let seen = 0;
    let paused = false;
    let waiting = [];
    let drawing = false;

    // -- what comes

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

    function made(tag, text, kind) {
      const element = document.createElement(tag);
      if (text !== undefined) element.textContent = text;
      if (kind) element.className = kind;
      return element;
    }

    function link(text, href) {
      const element = made("a", text);
      element.href = href;
      return element;
    }

    function row({ told, at }) {
      const details = made("details");
      details.dataset.channel = told.channel;
      details.dataset.event = told.event;
      const summary = made("summary");
      summary.append(made("span", clock.format(at), "when"), made("span", told.channel), made("span", told.event, "what"), made("span", told.data, "data"));
      details.append(summary);
      details.addEventListener("toggle", () => {
        if (!details.open || details.children.length > 1) return;
        const from = told.user_id ? `from user ${told.user_id}\n` : told.event.startsWith("client-") ? "from a client\n" : "";
        details.append(made("pre", `${from}${pretty(told.data)}`, "payload"));
      });
      details.hidden = !matches(told);
      return details;
    }

    function draw() {
      drawing = false;
      const rows = waiting.map(row).reverse();
      waiting = [];
      list.prepend(...rows);
      // So many of what the filter lets through, and of the rest: what is looked for isn't pushed out by what isn't.
      const many = { true: 0, false: 0 };
      for (const each of [...list.children]) {
        many[each.hidden] += 1;
        if (many[each.hidden] > KEPT) each.remove();
      }
      say();
    }

    function say() {
      const any = list.children.length > 0;
      list.hidden = !any;
      by("console-empty").hidden = any;
      const shown = [...list.children].filter((each) => !each.hidden).length;
      by("console-count").textContent = seen ? `${seen.toLocaleString()} seen${paused ? ", paused" : ""}; ${shown.toLocaleString()} shown` : "No event yet";
    }

    function came(told) {
      seen += 1;
      if (paused) return;
      waiting.push({ told, at: new Date() });
      if (waiting.length > KEPT) waiting.splice(Math.max(0, waiting.findIndex((each) => !matches(each.told))), 1);
      if (!drawing) {
        drawing = true;
        requestAnimationFrame(draw);
      }
    }

    // -- the line to the server

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
    // What stands in the publish box is there again behind the login.
    function ended() {
      state("Your session has ended. ", "off");
      by("console-state").append(link("Log in again", `/dashboard/login?next=${encodeURIComponent(location.pathname + location.search)}`));
      pusher.disconnect();
      if (by("publish")) sessionStorage.setItem(KEPT_BOX, JSON.stringify([...new FormData(by("publish"))]));
    }
    pusher.connection.bind("state_change", ({ current }) => {
      if (current !== "connected" && current !== "disconnected") state(current === "connecting" ? "Connecting…" : `Not connected (${current})`, current === "connecting" ? "" : "off");
    });
    channel.bind("pusher:subscription_succeeded", () => state("Live", "on"));
    channel.bind("pusher:subscription_error", (fault) => (GONE.includes(fault.status) ? ended() : state(`Refused: ${fault.error || fault.status}`, "off")));
    channel.bind("event", came);
    // Events are copied to here only while somebody says that they look.
    setInterval(async () => {
      const answer = await fetch(`${root.dataset.base}/watch`, { method: "POST", headers }).catch(() => null);
      if (answer && GONE.includes(answer.status)) ended();
    }, WATCH_MS);

    // -- the reader's wishes

    for (const id of ["only-channel", "only-event"]) {
      by(id).addEventListener("input", () => {
        for (const each of list.children) each.hidden = !matches(each.dataset);
        say();
      });
    }
    by("console-pause").addEventListener("click", (event) => {
      paused = !paused;
      event.target.textContent = paused ? "Go on" : "Pause";
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
    for (const [name, value] of JSON.parse(sessionStorage.getItem(KEPT_BOX) ?? "[]")) if (form.elements[name]) form.elements[name].value = value;
    sessionStorage.removeItem(KEPT_BOX);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const told = by("publish-state");
      for (const old of form.querySelectorAll(".fault")) old.remove();
      for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
      told.textContent = "Publishing…";
      try {
        const answer = await fetch(`${root.dataset.base}/publish`, { method: "POST", headers, body: new URLSearchParams(new FormData(form)) });
        const said = answer.headers.get("Content-Type")?.startsWith("application/json") ? await answer.json() : {};
        if (answer.ok && !said.fault && !answer.redirected) {
          told.textContent = "Published. ";
          told.append(link("Trace", `${root.dataset.trace}?trace_id=${said.trace_id}`));
          return;
        }
        if (!said.fault && GONE.includes(answer.status)) {
          told.textContent = "Not published: your session has ended. ";
          told.append(link("Log in again", `/dashboard/login?next=${encodeURIComponent(location.pathname)}`));
          ended();
          return;
        }
        told.textContent = said.fault ? "" : `Not published (${answer.status}).`;
        for (const [name, text] of Object.entries(said.fault ?? {})) {
          const field = form.elements[name];
          if (!field) {
            told.textContent = text;
            continue;
          }
          const fault = made("p", text, "fault");
          fault.id = `fault-${name}`;
          field.setAttribute("aria-invalid", "true");
          field.setAttribute("aria-describedby", fault.id);
          field.after(fault);
          field.focus();
        }
      } catch {
        told.textContent = "The server doesn't answer.";
      }
    });
  });
})();
