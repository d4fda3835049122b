// An OpenID Connect provider: npm's oidc-provider, with its own pages for login and consent. The login's name is the user;
// any password will do. Prints its issuer, reads redpoll's address from the first line of standard input, then "ready".
import { createServer } from "node:http";
import { createInterface } from "node:readline";
import Provider from "oidc-provider";

const USERS = {
  ann: { roles: ["redpoll_admin"] },
  vera: { roles: ["redpoll_viewer"], redpoll_apps: ["4711"] },
  walt: { roles: ["redpoll_viewer"], redpoll_apps: ["other"] },
  stan: { roles: ["stranger"] },
};

const server = createServer();
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  console.log(issuer);
  createInterface({ input: process.stdin }).once("line", (redpoll) => {
    const provider = new Provider(issuer, {
      clients: [{
        client_id: "redpoll",
        client_secret: "a secret of the client",
        redirect_uris: [`${redpoll}/dashboard/sso/callback`],
        post_logout_redirect_uris: [`${redpoll}/dashboard/login`],
      }],
      // Roles are in the ID token.
      claims: { openid: ["sub", "roles", "redpoll_apps", "preferred_username"], profile: [], email: [] },
      conformIdTokenClaims: false,
      findAccount: (ctx, id) => ({
        accountId: id,
        claims: () => ({ sub: id, preferred_username: id, ...USERS[id] }),
      }),
    });
    server.on("request", provider.callback());
    console.log("ready");
  });
});
process.stdin.on("end", () => process.exit());
