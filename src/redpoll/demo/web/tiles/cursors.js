// pusher-js: client events go from page to page, and the server adds who sent each.
const cursors = new Pusher(demo.key, demo.options).subscribe("presence-demo-cursors");
const pad = document.getElementById("board");
const keys = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
let [x, y, timer] = [0.5, 0.5, null];

function draw(id, { x, y }) {
  const cursor = document.getElementById(id) ?? pad.appendChild(document.createElement("b"));
  const { name, colour } = cursors.members.get(id).info;
  Object.assign(cursor, { id, className: `cursor c${colour}`, textContent: name });
  Object.assign(cursor.style, { left: `${100 * x}%`, top: `${100 * y}%` });
}
function move(event, ...to) {
  if (!cursors.subscribed) return;
  event.preventDefault();
  [x, y] = to.map((part) => Math.min(1, Math.max(0, part)));
  draw(cursors.members.myID, { x, y });
  timer ??= setTimeout(() => { timer = null; cursors.trigger("client-at", { x, y }); }, 110);
}
pad.onpointermove = (e) => move(e, e.offsetX / pad.clientWidth, e.offsetY / pad.clientHeight);
pad.onkeydown = (e) => keys[e.key] && move(e, x + keys[e.key][0] / 25, y + keys[e.key][1] / 9);
cursors.bind("client-at", (at, { user_id }) => draw(user_id, at));
cursors.bind("pusher:member_removed", ({ id }) => document.getElementById(id)?.remove());
