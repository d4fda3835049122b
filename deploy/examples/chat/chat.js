// Laravel Echo on a presence channel.
import Echo from "./echo.js";

const [people, log, form] = ["people", "log", "form"].map((id) => document.getElementById(id));
const echo = new Echo({ broadcaster: "pusher", key: demo.key, ...demo.options });
let here = [];
const show = (all) => people.replaceChildren((here = all).map(({ name }) => name).join(", "));

echo.join("demo-chat").here(show)
  .joining((user) => show([...here, user]))
  .leaving((user) => show(here.filter(({ id }) => id !== user.id)))
  .listen(".message", ({ id, name, text }) => {
    if (document.getElementById(id)) return; // after a reconnect, the history repeats messages
    const line = log.appendChild(document.createElement("p"));
    Object.assign(line, { id, textContent: `${name}: ${text}` });
    log.scrollTop = log.scrollHeight;
  });
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const body = new URLSearchParams({ user: demo.user, text: form.message.value });
  fetch("say", { method: "POST", body }).then(({ ok }) => ok && form.reset());
});
