// What transformers.js makes of an export's tokenizer: token ids.
//
//     node with_transformers_js.mjs EXPORT QUESTIONS ANSWERS
//
// It loads @huggingface/tokenizers, the part of transformers.js that reads tokenizer.json, from where run.sh put it.
import fs from "node:fs";
import path from "node:path";

const [exported, questions, answers] = process.argv.slice(2);
const place = new URL("../../../.clients/transformers.js/node_modules/@huggingface/tokenizers/", import.meta.url);
const { Tokenizer } = await import(new URL("dist/tokenizers.mjs", place));
const read = (file) => JSON.parse(fs.readFileSync(file, "utf8"));
const tokenizer = new Tokenizer(
  read(path.join(exported, "tokenizer.json")),
  read(path.join(exported, "tokenizer_config.json")),
);
const ids = read(questions).lines.map((line) => tokenizer.encode(line, { add_special_tokens: false }).ids.map(Number));
fs.writeFileSync(answers, JSON.stringify({ ids, version: read(new URL("package.json", place)).version }));
