// Random texts in random parts, joined, repeated and lost on the way: what is shown as whole is what was sent.
// node random_texts.mjs FIRST COUNT; prints one line, or throws with the seed.
import { Texts } from "../../../src/redpoll_js/texts.mjs";

function randomOf(seed) {
  let state = seed * 2654435761 + 1;
  return (below) => {
    state = (state * 1664525 + 1013904223) % 4294967296;
    return Math.floor((state / 4294967296) * below);
  };
}

const check = (seed, ok, why) => {
  if (!ok) throw new Error(`seed ${seed}: ${why}`);
};

let whole = 0;
let cut = 0;
function run(seed) {
  const random = randomOf(seed);
  const alphabet = ["a", "ü", "🐦", "\n", "\"", "\ud83d", ""];
  const withLength = random(3) > 0;
  let sent = "";
  let parts = [];
  const count = random(40);
  for (let n = 0; n < count; n += 1) {
    const delta = Array.from({ length: random(6) }, () => alphabet[random(alphabet.length)]).join("");
    sent += delta;
    parts.push({ stream: "a", n, delta, ...(withLength && { length: sent.length }) });
  }
  parts.push({ stream: "a", n: count, state: ["done", "failed", "cancelled"][random(3)], ...(withLength && { length: sent.length }) });
  const { state } = parts[count];

  // As a rule's `--join` does it: the texts together, everything else of the last part.
  const joins = random(2) === 1;
  if (joins) {
    parts = parts.reduce((made, part) => {
      const last = made[made.length - 1];
      if (!last || part.delta === undefined || random(2)) return [...made, part];
      return [...made.slice(0, -1), { ...part, delta: last.delta + part.delta }];
    }, []);
  }
  // Joined ones without a length can't show a loss; then the source says so, by gap().
  const loses = (withLength || !joins) && random(3) === 0;
  const texts = new Texts();
  let isLost = false;
  for (const [index, part] of parts.entries()) {
    if (loses && part.delta && random(6) === 0) {
      isLost = true;
      continue;
    }
    texts.take("answer", part, joins);
    if (random(4) === 0 && (withLength || !joins)) texts.take("answer", parts[random(index + 1)], joins);
    const [shown] = texts.list();
    if (shown && !isLost) check(seed, sent.startsWith(shown.text), "the text isn't a beginning of what was sent");
  }
  const [shown] = texts.list();
  if (isLost && shown.text !== sent) {
    cut += 1;
    check(seed, shown.state !== "done", "a cut text is shown as whole");
  } else {
    whole += 1;
    check(seed, shown.text === sent && shown.state === state, `${shown.state}: ${shown.text} instead of ${sent}`);
  }
}

const [first, count] = process.argv.slice(2).map(Number);
for (let seed = first; seed < first + count; seed += 1) run(seed);
console.log(JSON.stringify({ whole, cut }));
