// Unpacks what is in the package @sparticuz/chromium: the program, libraries that a bare system lacks, fonts.
import { execFileSync } from "node:child_process";
import { createReadStream, createWriteStream, mkdirSync } from "node:fs";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const from = "node_modules/@sparticuz/chromium/bin";

async function inflate(file, to, mode) {
  await pipeline(createReadStream(`${from}/${file}`), createBrotliDecompress(), createWriteStream(to, { mode }));
}

await inflate("chromium.br", "chromium", 0o755);
for (const [archive, folder] of [["al2023", "."], ["fonts", "."]]) {
  mkdirSync(folder, { recursive: true });
  await inflate(`${archive}.tar.br`, `${archive}.tar`, 0o644);
  execFileSync("tar", ["-xf", `${archive}.tar`, "-C", folder, "--no-same-owner"]);
  execFileSync("rm", [`${archive}.tar`]);
}
