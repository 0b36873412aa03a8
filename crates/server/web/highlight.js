// Colours for code: comments, texts, numbers, words of the language. A look, not a grammar.

const C_LIKE =
  "abstract as async await auto bool break case catch char class const continue crate default delete do double else enum export extends extern " +
  "false final finally float fn for from func function go if impl implements import in int interface let long loop match mod mut namespace new " +
  "nil null override package private protected pub public return self short signed sizeof static struct super switch template this throw trait " +
  "true try type typedef typeof undefined union unsafe unsigned use using var virtual void volatile where while yield";
const PYTHON =
  "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not " +
  "or pass raise return self True try while with yield match case";
const SHELL = "case do done elif else esac exit export fi for function if in local readonly return set shift then until while";
const SQL =
  "all alter and as asc between by case create delete desc distinct drop else end exists from group having in index inner insert into is join key " +
  "left like limit not null on or order outer primary references right select set table then union unique update values view when where with";

const words = (list) => new Set(list.split(" "));
const FAMILIES = {
  c: { words: words(C_LIKE), line: "//", block: true, texts: "\"'`" },
  python: { words: words(PYTHON), line: "#", texts: "\"'" },
  shell: { words: words(SHELL), line: "#", texts: "\"'" },
  sql: { words: words(SQL), line: "--", block: true, texts: "'", anyCase: true },
  data: { words: words("true false null yes no on off"), line: "#", texts: "\"'" },
  json: { words: words("true false null"), texts: "\"" },
};
const LANGUAGES = {
  python: "python py python3",
  shell: "bash sh shell zsh console",
  sql: "sql",
  data: "yaml yml toml ini",
  json: "json jsonc",
  c: "c h cpp c++ cc rust rs go java javascript js jsx typescript ts tsx kotlin swift csharp cs c# php scala dart zig cuda css scss",
};
const FAMILY_OF = new Map(Object.entries(LANGUAGES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])));

/** Parts of a code as `[class or null, text]`; their texts add up to the code. */
export function highlight(code, language) {
  const family = FAMILIES[FAMILY_OF.get(language.toLowerCase())];
  if (!family) return [[null, code]];
  const parts = [];
  let plain = 0;
  let at = 0;
  const take = (kind, end) => {
    if (plain < at) parts.push([null, code.slice(plain, at)]);
    parts.push([kind, code.slice(at, end)]);
    at = end;
    plain = end;
  };
  while (at < code.length) {
    if (family.line && code.startsWith(family.line, at)) take("comment", upTo(code, "\n", at, 0));
    else if (family.block && code.startsWith("/*", at)) take("comment", upTo(code, "*/", at + 2, 2));
    else if (family.texts.includes(code[at])) take("string", endOfText(code, at));
    else {
      const word = /[\p{L}_$][\p{L}\p{N}_$]*|\d[\w.]*/uy;
      word.lastIndex = at;
      const found = word.exec(code)?.[0];
      if (!found) at += 1;
      else if (/^\d/.test(found)) take("number", at + found.length);
      else if (family.words.has(family.anyCase ? found.toLowerCase() : found)) take("keyword", at + found.length);
      else at += found.length;
    }
  }
  if (plain < code.length) parts.push([null, code.slice(plain)]);
  return parts;
}

function upTo(code, end, from, more) {
  const found = code.indexOf(end, from);
  return found < 0 ? code.length : found + more;
}

/** After the quote that closes the text; a text in simple quotes ends with its line. */
function endOfText(code, from) {
  const quote = code[from];
  for (let at = from + 1; at < code.length; at += 1) {
    if (code[at] === "\\") at += 1;
    else if (code[at] === quote) return at + 1;
    else if (code[at] === "\n" && quote !== "`") return at;
  }
  return code.length;
}
