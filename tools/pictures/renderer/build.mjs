// Bundles the renderer for a browser: out/bundle.js and out/bundle.css.
import { build } from "esbuild";

await build({
  entryPoints: { bundle: "main.jsx" },
  bundle: true,
  format: "iife",
  outdir: "out",
  minify: true,
  jsx: "automatic",
  loader: { ".svg": "dataurl", ".png": "dataurl", ".woff2": "dataurl", ".ttf": "dataurl" },
  define: { "process.env.NODE_ENV": '"production"', global: "window" },
  logLevel: "warning",
});
