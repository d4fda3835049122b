// Runs on every page: times in the reader's time zone, copy buttons, confirmation dialogs, tabs, the menu, and the light
// and dark themes. htmx makes all requests to the server.
(() => {
  "use strict";

  // -- times

  const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
  const ago = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });
  const units = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60]];

  function relative(at) {
    const seconds = (at - Date.now()) / 1000;
    for (const [unit, size] of units) {
      if (Math.abs(seconds) >= size) return ago.format(Math.round(seconds / size), unit);
    }
    return Math.abs(seconds) < 5 ? "just now" : ago.format(Math.round(seconds), "second");
  }

  function sayTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const at = new Date(element.dateTime);
      const how = element.dataset.how;
      element.textContent = how === "date" ? date.format(at) : how === "time" ? full.format(at) : relative(at);
      element.title = full.format(at);
    }
  }

  // -- messages

  let toastTimer;
  function toast(text) {
    const box = document.getElementById("toast");
    if (!box) return;
    box.textContent = text;
    box.hidden = false;
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => { box.hidden = true; }, 5000);
  }

  // -- clicks

  async function copy(button) {
    const text = button.dataset.copy || document.getElementById(button.dataset.copyFrom).textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Browsers forbid the clipboard API over plain http, except on localhost.
      const area = document.createElement("textarea");
      area.value = text;
      (button.closest("dialog") || document.body).append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const label = button.querySelector("span");
    const before = label.textContent;
    label.textContent = "Copied";
    button.classList.add("is-done");
    setTimeout(() => { label.textContent = before; button.classList.remove("is-done"); }, 1500);
  }

  function choose(tab) {
    const list = tab.closest("[role=tablist]");
    for (const other of list.querySelectorAll("[role=tab]")) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", chosen);
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-copy], [data-copy-from], [data-opens], [data-closes], [data-menu], [data-theme-switch], [data-all], [role=tab]");
    for (const open of document.querySelectorAll(".dropdown[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
    if (!target) return;
    if (target.matches("[data-copy], [data-copy-from]")) copy(target);
    else if (target.matches("[data-opens]")) document.getElementById(target.dataset.opens).showModal();
    else if (target.matches("[data-closes]")) target.closest("dialog").close();
    else if (target.matches("[role=tab]")) choose(target);
    else if (target.matches("[data-menu]")) {
      const open = target.closest(".side").classList.toggle("is-open");
      target.setAttribute("aria-expanded", open);
    } else if (target.matches("[data-theme-switch]")) {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      localStorage.setItem("redpoll-theme", root.dataset.theme);
      document.dispatchEvent(new Event("redpoll:theme"));
    } else if (target.matches("[data-all]")) {
      for (const box of document.querySelectorAll(`input[name="${target.dataset.all}"]`)) box.checked = target.checked;
      countTicked();
    }
  });

  document.addEventListener("keydown", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      const tabs = [...tab.closest("[role=tablist]").querySelectorAll("[role=tab]")];
      const next = tabs[(tabs.indexOf(tab) + (event.key === "ArrowRight" ? 1 : tabs.length - 1)) % tabs.length];
      choose(next);
      next.focus();
    }
    if (event.key === "Escape") {
      for (const open of document.querySelectorAll(".dropdown[open]")) {
        if (open.contains(document.activeElement)) open.querySelector("summary").focus();
        open.open = false;
      }
    }
  });

  // -- forms

  // How many selected rows a confirmation dialog lists.
  const MAX_NAMED = 10;

  // Buttons that act on selected rows show their number, and are disabled while there are none.
  function countTicked() {
    for (const button of document.querySelectorAll("[data-needs-ticked]")) {
      const many = document.querySelectorAll(`input[name="${button.dataset.needsTicked}"]:checked`).length;
      button.disabled = many === 0;
      const count = button.querySelector(".ticked");
      if (count) count.textContent = many ? ` (${many})` : "";
    }
    for (const list of document.querySelectorAll("[data-names-ticked]")) {
      const ticked = [...document.querySelectorAll(`input[name="${list.dataset.namesTicked}"]:checked`)];
      const names = ticked.slice(0, MAX_NAMED).map((box) => box.getAttribute("aria-label"));
      if (ticked.length > MAX_NAMED) names.push(`and ${ticked.length - MAX_NAMED} more`);
      list.replaceChildren(...names.map((name) => Object.assign(document.createElement("li"), { textContent: name })));
    }
  }

  // Shows fields that depend on the value of another field.
  function showDependents() {
    for (const part of document.querySelectorAll("[data-when]")) {
      const [name, value] = part.dataset.when.split("=");
      const field = document.querySelector(`[name="${name}"]:checked`) || document.querySelector(`select[name="${name}"]`);
      part.hidden = !field || !value.split("|").includes(field.value);
    }
  }

  // A time is entered in the reader's time zone. A hidden field sends it as Unix milliseconds.
  function showMoments() {
    for (const field of document.querySelectorAll("input[data-moment]")) {
      const at = Number(document.getElementById(field.dataset.moment).value);
      if (at) field.value = new Date(at - new Date(at).getTimezoneOffset() * 60000).toISOString().slice(0, 19);
    }
  }

  document.addEventListener("change", (event) => {
    if (event.target.matches("input[data-moment]")) {
      const at = new Date(event.target.value).getTime();
      document.getElementById(event.target.dataset.moment).value = Number.isNaN(at) ? "" : at;
    }
    if (event.target.matches("[data-submits]")) event.target.form.requestSubmit();
    countTicked();
    showDependents();
  });
  document.addEventListener("submit", (event) => {
    // Twice clicked is once meant.
    if (event.defaultPrevented || event.target.method !== "post") return;
    const button = event.submitter;
    if (button) setTimeout(() => { button.disabled = true; setTimeout(() => { button.disabled = false; countTicked(); }, 4000); });
  });

  // -- htmx

  document.addEventListener("htmx:afterSwap", (event) => { sayTimes(event.target.parentNode || document); countTicked(); });
  document.addEventListener("htmx:responseError", (event) => toast(`The server answered ${event.detail.xhr.status}; what you see may be old.`));
  document.addEventListener("htmx:sendError", () => toast("The server doesn't respond. This page may be out of date."));
  // A table is not refreshed while the reader uses it.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const table = event.target;
    if (!table.matches("[data-live]")) return;
    const busy = document.querySelector("dialog[open]") || table.querySelector("details[open], input:checked") || table.contains(document.activeElement);
    if (busy || document.hidden) event.preventDefault();
  });

  function ready() {
    sayTimes(document);
    countTicked();
    showDependents();
    showMoments();
    const fault = document.querySelector("[aria-invalid=true]");
    if (fault) {
      fault.focus({ preventScroll: true });
      // Centred, so that sticky elements at the edges don't cover it.
      fault.scrollIntoView({ block: "center" });
    }
    setInterval(() => sayTimes(document), 30000);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", ready);
  else ready();
})();
