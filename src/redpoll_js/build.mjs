// Makes one script of the modules, for pages without a build step and for `require`:
//
//   node src/redpoll_js/build.mjs src/redpoll/control/static/redpoll.js
//
// It has the lines of the modules, so a page's debugger shows them. Without a path it writes redpoll.js beside this file,
// as `npm pack` does.

import { readFileSync, writeFileSync } from "node:fs";

// A module comes after those that it imports.
const MODULES = ["authorizer", "recovery", "texts", "sources", "follow", "index"];
const IMPORT = /^import .*;\n/gm;
const EXPORT_LIST = /^export (\{.*\}|default .*);\n/gm;

function body(name) {
  const text = readFileSync(new URL(`${name}.mjs`, import.meta.url), "utf8");
  return text.replace(IMPORT, "").replace(EXPORT_LIST, "").replace(/^export /gm, "");
}

const [head, ...rest] = body("index").split(/(?<=^ \*\/\n)/m);
const parts = [...MODULES.slice(0, -1).map(body), rest.join("")];
const script = `${head}(function (root, make) {
  if (typeof module === "object" && module.exports) module.exports = make();
  else root.redpoll = make();
})(typeof self === "undefined" ? globalThis : self, function () {
"use strict";

${parts.map((part) => part.trim()).join("\n\n")}

return redpoll;
});
`;
writeFileSync(process.argv[2] || new URL("redpoll.js", import.meta.url), script);
