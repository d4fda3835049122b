// pusher-js with redpoll.js, a script of the server: each message once and in order.
const pusher = redpoll(new Pusher(demo.key, demo.options));
// A page that is opened late gets the beginning.
const text = pusher.subscribe("demo-text", { rewind: { count: 300 } });
const output = document.getElementById("output");
const button = document.getElementById("again");

function writing(isWriting) {
  output.ariaBusy = String(isWriting); // screen readers wait for all of it
  button.disabled = isWriting;
}
text.bind("begin", () => { output.textContent = ""; writing(true); });
text.bind("word", ({ word }) => output.append(word));
text.bind("end", () => writing(false));
text.bind("pusher:position", ({ recovered }) => {
  if (recovered === false) output.append("[words are missing] ");
});
button.onclick = () => fetch("write", { method: "POST" });
