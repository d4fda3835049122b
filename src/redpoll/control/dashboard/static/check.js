// The check of the connection, run by this browser: what `redpoll doctor URL` does, as far as a page can see it.
(() => {
  "use strict";

  const STEP_MS = 12000;
  const MAX_SKEW_S = 600;
  const MARKS = { ok: "ok", warning: "warn", failed: "bad", skipped: "" };

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("check");
    if (!root) return;
    const { key, url, sockets, base, csrf, publishes } = root.dataset;
    const causes = JSON.parse(root.dataset.causes);
    const by = (id) => document.getElementById(id);

    function element(tag, text, kind) {
      const made = document.createElement(tag);
      if (text) made.textContent = text;
      if (kind) made.className = kind;
      return made;
    }

    function show(step, verdict, seen, cause = "", remedy = []) {
      const row = element("tr");
      const result = element("td");
      result.dataset.label = "Result";
      result.append(element("span", verdict, `badge ${MARKS[verdict]}`));
      const cell = element("td", seen);
      cell.dataset.label = "Seen";
      if (cause) cell.append(element("p", `Likely cause: ${cause}.`));
      if (remedy.length) {
        const lines = element("pre", remedy.join("\n"), "payload");
        lines.tabIndex = 0;
        cell.append(lines);
      }
      row.append(element("td", step), result, cell);
      by("check-rows").append(row);
      return verdict !== "failed";
    }

    const since = (began) => `${(performance.now() - began).toFixed(1)} ms`;

    // -- the steps; each returns whether the next one makes sense

    function address() {
      if (location.protocol === "https:" && url.startsWith("http:")) {
        return show("Address", "failed", `${url}, and this page was loaded by https`, "browsers open no unencrypted connection from an encrypted page", [
          "give redpoll a certificate (tls_port, tls_cert, tls_key) or a proxy that ends TLS,",
          "and set public_url to its https:// address",
        ]);
      }
      return show("Address", "ok", `${sockets}/app/${key}`);
    }

    async function http() {
      const began = performance.now();
      try {
        await fetch(`${url}/healthz`, { mode: "no-cors", cache: "no-store", signal: AbortSignal.timeout(STEP_MS) });
      } catch (error) {
        const late = error.name === "TimeoutError";
        return show("HTTP", "failed", late ? `no answer within ${STEP_MS / 1000} s` : `no answer; it failed after ${since(began)}`,
          late ? "a firewall or a cloud security group drops packets to this port" : "the name doesn't exist, nothing listens on the port, or the certificate isn't accepted; browsers don't tell pages which", [
            `open ${url}/healthz in a new tab: the browser names the fault`,
            `or on any machine: redpoll doctor ${sockets}/app/${key}`,
          ]);
      }
      return show("HTTP", "ok", `GET /healthz answered in ${since(began)}`);
    }

    async function clock() {
      const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" }).catch(() => null);
      const date = answer && answer.headers.get("Date");
      if (!date) return true;
      const skew = Math.round((Date.parse(date) - Date.now()) / 1000);
      if (Math.abs(skew) < 60) return show("Clock", "ok", "agrees with the server's");
      const seen = `the server's clock is ${Math.abs(skew)} s ${skew > 0 ? "ahead of" : "behind"} this machine's`;
      return show("Clock", "warning", seen, `back ends whose clock differs by more than ${MAX_SKEW_S} s are refused`, ["set the clock of whichever is wrong: timedatectl set-ntp true"]);
    }

    class Connection {
      constructor() {
        this.frames = [];
        this.wake = () => {};
        this.code = 0;
        this.opened = new Promise((resolve) => {
          this.socket = new WebSocket(`${sockets}/app/${key}?protocol=7&client=dashboard-check&version=1`);
          this.socket.onopen = () => resolve(true);
          this.socket.onclose = ({ code }) => {
            this.code = code;
            resolve(false);
            this.wake();
          };
          this.socket.onmessage = ({ data }) => {
            this.frames.push(JSON.parse(data));
            this.wake();
          };
        });
      }

      // The next frame with one of these events; null if the connection ends or none comes in time.
      async next(events, withinMs, onTick = () => {}) {
        const end = performance.now() + withinMs;
        for (;;) {
          while (this.frames.length) {
            const frame = this.frames.shift();
            if (events.includes(frame.event)) return frame;
          }
          const left = end - performance.now();
          if (this.code || left <= 0) return null;
          onTick(left);
          await new Promise((resolve) => {
            this.wake = resolve;
            setTimeout(resolve, Math.min(left, 1000));
          });
        }
      }

      send(event, data) {
        this.socket.send(JSON.stringify({ event, data }));
      }
    }

    async function greeted(connection) {
      const began = performance.now();
      const opened = await Promise.race([connection.opened, new Promise((resolve) => setTimeout(resolve, STEP_MS, false))]);
      if (!opened) {
        return show("Upgrade", "failed", `the WebSocket didn't open${connection.code ? ` (${connection.code})` : ""}, though HTTP works`, "a proxy in between doesn't forward the Upgrade header, or the path /app/", causes.upgrade);
      }
      show("Upgrade", "ok", `the WebSocket opened in ${since(began)}`);
      const frame = await connection.next(["pusher:connection_established", "pusher:error"], STEP_MS);
      const data = frame && (typeof frame.data === "string" ? JSON.parse(frame.data) : frame.data);
      if (!frame) return show("Connect", "failed", "no greeting came", "what answers isn't a Pusher server");
      if (frame.event === "pusher:error") {
        const [cause, remedy] = causes.refusals[data.code] || ["the server refuses this client", ""];
        return show("Connect", "failed", `${data.code}: ${data.message}`, data.code === 4009 ? `${cause}; this page's origin is ${location.origin}` : cause, remedy ? [remedy] : []);
      }
      return show("Connect", "ok", `connection_established, socket id ${data.socket_id}`);
    }

    async function subscribed(connection, channel) {
      const began = performance.now();
      connection.send("pusher:subscribe", { channel });
      const frame = await connection.next(["pusher_internal:subscription_succeeded"], STEP_MS);
      if (!frame) return show("Subscribe", "failed", `no subscription_succeeded within ${STEP_MS / 1000} s`, "the worker can't reach Redis", ["look at /readyz on the control port, and at redis_url"]);
      return show("Subscribe", "ok", `${channel}: succeeded in ${since(began)}`);
    }

    async function published(connection, channel) {
      if (publishes !== "1") return show("Publish", "skipped", "only admins may publish");
      const began = performance.now();
      const body = new URLSearchParams({ channel, name: "check", data: "{}" });
      const answer = await fetch(`${base}/console/publish`, { method: "POST", body, headers: { "X-CSRF-Token": csrf } }).catch(() => null);
      if (!answer || !answer.ok) return show("Publish", "failed", answer ? `the dashboard answered ${answer.status}` : "the dashboard doesn't answer", "the control plane can't reach Redis", ["look at /readyz on the control port"]);
      show("Publish", "ok", `accepted in ${since(began)}`);
      const frame = await connection.next(["check"], STEP_MS);
      if (!frame) return show("Receive", "failed", `the event didn't arrive within ${STEP_MS / 1000} s`, "this dashboard and the checked address belong to different servers, or to different Redis databases", ["check that every node has the same redis_url and redis_prefix"]);
      return show("Receive", "ok", `round trip ${since(began)}`);
    }

    async function idle(connection) {
      const patience = Number(by("patience").value);
      if (!(patience > 0)) return show("Idle", "skipped", "not waited for");
      const began = performance.now();
      const frame = await connection.next(["pusher:ping"], patience * 1000, (left) => state(`Waiting in silence, ${Math.ceil(left / 1000)} s left…`));
      const silent = Math.round((performance.now() - began) / 1000);
      if (frame) return show("Idle", "ok", `open after ${silent} s, when the server sent its own ping`);
      if (!connection.code) return show("Idle", "ok", `still open after ${silent} s of silence`);
      if (connection.code >= 4000) return show("Idle", "failed", `closed with ${connection.code} after ${silent} s`, "the server closed the connection");
      return show("Idle", "failed", `closed (${connection.code}) after ${silent} s of silence`, `a proxy or firewall in between closes connections that are idle for ${silent} s`, causes.idle);
    }

    function state(text) {
      by("check-state").textContent = text;
    }

    by("check-start").addEventListener("click", async () => {
      const start = by("check-start");
      start.disabled = true;
      by("check-rows").replaceChildren();
      by("check-result").hidden = false;
      state("Checking…");
      let connection = null;
      let good = address() && (await http()) && (await clock());
      if (good) {
        connection = new Connection();
        const channel = `check-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
        good = (await greeted(connection)) && (await subscribed(connection, channel)) && (await published(connection, channel)) && (await idle(connection));
        connection.socket.close();
      }
      state(good ? "Nothing is wrong." : "The last line says what is wrong.");
      start.disabled = false;
    });
  });
})();
