// pusher-js on a public channel. A history rule sends each new subscriber the last minute.
const ticker = new Pusher(demo.key, demo.options).subscribe("demo-ticker");
const prices = [];

ticker.bind("price", ({ n, price }) => {
  if (n <= prices.at(-1)?.n) return; // after a reconnect, the history repeats prices
  prices.push({ n, price });
  if (prices.length > 60) prices.shift();
  document.getElementById("price").textContent = price;
  const values = prices.map((tick) => tick.price);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const height = (value) => 95 - (90 * (value - low)) / (high - low || 1);
  const points = values.map((value, at) => `${at * 5},${height(value)}`);
  document.getElementById("line").setAttribute("points", points.join(" "));
});
