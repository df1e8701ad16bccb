// node shoot.mjs DASHBOARD.json PICTURE.png HEIGHT [KEY=VALUE ...]
// Draws a dashboard in Chromium and takes the upper HEIGHT pixels; exits with 1 and says so where a panel has a problem.
// Keys: prom (URL), from and to (Unix time), theme (dark or light), and var-NAME for what is chosen.
import fs from "node:fs";
import http from "node:http";
import puppeteer from "puppeteer-core";

const [dashboard, picture, height, ...chosen] = process.argv.slice(2);
const WIDTH = 1632;
const page = `<!doctype html><meta charset=utf-8><link rel=stylesheet href="/bundle.css"><body style="margin:0">
<div id=root></div><script>window.dashboard=${fs.readFileSync(dashboard, "utf8")}</script><script src="/bundle.js"></script>`;

const server = http
  .createServer((request, response) => {
    const path = request.url.split("?")[0];
    if (path === "/") response.setHeader("content-type", "text/html").end(page);
    else if (/^\/bundle\.(js|css)$/.test(path)) response.end(fs.readFileSync(`out${path}`));
    else response.writeHead(404).end();
  })
  .listen(0, "127.0.0.1");
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
});
try {
  const tab = await browser.newPage();
  // Tall enough for all of it: tables draw only the rows that are in view.
  await tab.setViewport({ width: WIDTH, height: 6000 });
  const choices = new URLSearchParams(chosen.map((each) => each.split(/=(.*)/s).slice(0, 2)));
  await tab.goto(`http://127.0.0.1:${server.address().port}/?${choices}`);
  await tab.waitForFunction("window.drawn", { timeout: 180000 });
  await tab.screenshot({ path: picture, clip: { x: 0, y: 0, width: WIDTH, height: +height } });
  for (const problem of await tab.evaluate("window.problems")) {
    console.error(`${dashboard}: ${problem}`);
    process.exitCode = 1;
  }
} finally {
  await browser.close();
  server.close();
}
