// What transformers.js makes of an export's tokenizer: token ids.
//
//     node with_transformers_js.mjs PACKAGE EXPORT QUESTIONS ANSWERS
//
// PACKAGE is the folder of @huggingface/tokenizers, the part of transformers.js that reads tokenizer.json.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, exported, questions, answers] = process.argv.slice(2);
const { Tokenizer } = await import(pathToFileURL(path.resolve(folder, "dist/tokenizers.mjs")));
const read = (file) => JSON.parse(fs.readFileSync(file, "utf8"));
const tokenizer = new Tokenizer(
  read(path.join(exported, "tokenizer.json")),
  read(path.join(exported, "tokenizer_config.json")),
);
const ids = read(questions).lines.map((line) => tokenizer.encode(line, { add_special_tokens: false }).ids.map(Number));
fs.writeFileSync(answers, JSON.stringify({ ids, version: read(path.join(folder, "package.json")).version }));
