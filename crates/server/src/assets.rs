//! Files that the server carries: what lies in `web/` goes into the table below and is served under `/web/`, `index.html` as
//! the start page too. Nothing is read from disk while the server runs, so no path of a client reaches a file.

use axum::extract::Path;
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};

use crate::error::{ApiError, Kind};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// The table: types and names.
macro_rules! files {
    ($($kind:ident: $($name:literal)+;)+) => {
        &[$($(($name, $kind, include_bytes!(concat!("../web/", $name)))),+),+]
    };
}

/// Name, type, contents.
const FILES: &[(&str, &str, &[u8])] = files! {
    HTML: "index.html";
    CSS: "base.css" "chat.css" "dashboard.css";
    SCRIPT: "api.js" "charts.js" "chat.js" "dashboard.js" "dom.js" "highlight.js" "i18n.js" "inline.js" "main.js" "markdown.js"
        "memory.js" "message.js" "settings.js" "sse.js" "store.js" "texts.js" "tokens.js" "watch.js";
    PICTURE: "icon.svg";
};

/// The page loads nothing from elsewhere, is loaded by nobody, and can't turn a text into markup or a program.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

pub(crate) async fn start_page() -> Response {
    file("index.html")
}

pub(crate) async fn by_name(Path(name): Path<String>) -> Response {
    file(&name)
}

fn file(name: &str) -> Response {
    let Some((_, kind, contents)) = FILES.iter().find(|(known, ..)| *known == name) else {
        return ApiError::new(Kind::NotFound, "there is no such file").into_response();
    };
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(kind)),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
    ];
    (headers, *contents).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn texts() -> impl Iterator<Item = (&'static str, &'static str)> {
        FILES.iter().map(|(name, _, contents)| (*name, std::str::from_utf8(contents).unwrap()))
    }

    fn text(name: &str) -> &'static str {
        texts().find(|(known, _)| *known == name).unwrap().1
    }

    /// What stands between a beginning and the next quote.
    fn quoted<'a>(text: &'a str, begin: &'a str) -> impl Iterator<Item = &'a str> {
        text.match_indices(begin).filter_map(move |(at, _)| text[at + begin.len()..].split('"').next())
    }

    #[test]
    fn the_table_is_the_folder() {
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/web")).unwrap();
        let there: BTreeSet<String> = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let known: BTreeSet<String> = FILES.iter().map(|(name, ..)| (*name).to_owned()).collect();
        assert_eq!(there, known);
        let kinds = [("html", HTML), ("css", CSS), ("js", SCRIPT), ("svg", PICTURE)];
        for (name, kind, _) in FILES {
            let ending = name.rsplit('.').next().unwrap();
            assert_eq!(kinds.iter().find(|(known, _)| *known == ending).unwrap().1, *kind, "{name}");
        }
    }

    #[test]
    fn every_file_that_is_named_is_there() {
        let known = |name: &str| FILES.iter().any(|(known, ..)| *known == name);
        for (file, text) in texts() {
            for name in quoted(text, "\"/web/").chain(quoted(text, "from \"./")) {
                assert!(known(name), "{file} names {name}");
            }
        }
    }

    #[test]
    fn nothing_comes_from_elsewhere_and_no_text_becomes_markup() {
        for (file, text) in texts() {
            let text = text.replace("http://www.w3.org/2000/svg", "");
            let wrong = [
                "http://",
                "https://",
                "src=\"//",
                "url(",
                "@import",
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "style=",
                "<style",
                "onclick=",
                "javascript:",
            ];
            for part in wrong {
                assert!(!text.contains(part), "{file} has {part}");
            }
        }
        let index = text("index.html");
        assert_eq!(index.matches("<script").count(), index.matches("<script type=\"module\" src=\"").count());
        assert!(!POLICY.contains("unsafe") && !POLICY.contains('*') && !POLICY.contains("http"));
    }

    /// Keys of the table of texts with both languages.
    fn table() -> BTreeMap<&'static str, [String; 2]> {
        let mut table = BTreeMap::new();
        for line in text("texts.js").lines().filter(|line| line.starts_with("  ")) {
            let (key, both) = line.trim().strip_suffix(',').and_then(|line| line.split_once(": ")).unwrap();
            let both: [String; 2] = serde_json::from_str(both).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert!(table.insert(key, both).is_none(), "{key} is there twice");
        }
        table
    }

    #[test]
    fn every_text_has_both_languages() {
        let places = |text: &str| -> BTreeSet<String> {
            text.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0.to_owned())).collect()
        };
        let table = table();
        assert!(table.len() > 100);
        for (key, [english, chinese]) in table {
            assert!(!english.trim().is_empty() && !chinese.trim().is_empty(), "{key}");
            assert_eq!(places(&english), places(&chinese), "{key}");
            assert!(
                english.is_ascii()
                    || english.chars().all(|c| !('\u{4e00}'..='\u{9fff}').contains(&c))
                    || key.contains("anguage"),
                "{key}"
            );
        }
    }

    #[test]
    fn texts_that_are_used_exist_and_those_that_exist_are_used() {
        let table = table();
        let mut all = String::new();
        for (file, text) in texts().filter(|(file, _)| *file != "texts.js") {
            let keys = ["t(\"", "data-text=\"", "data-label=\"", "data-placeholder=\""];
            for key in keys.into_iter().flat_map(|begin| quoted(text, begin)) {
                // `get("…")`, `split("…")` and the like end as `t("…")` does.
                let is_text = text.contains(&format!(" t(\"{key}\"")) || text.contains(&format!("=\"{key}\""));
                assert!(!is_text || table.contains_key(key), "{file} wants {key}");
            }
            all.push_str(text);
        }
        let families = ["state_", "health_", "trust_", "kind_", "kv_", "set_"];
        for key in table.keys().filter(|key| !families.iter().any(|family| key.starts_with(family))) {
            assert!(all.contains(&format!("\"{key}\"")), "nobody uses {key}");
        }
    }

    #[test]
    fn words_of_the_server_have_texts() {
        use crate::State as S;
        let table = table();
        let states = [S::Loading, S::Warming, S::Ready, S::Draining].map(S::name);
        for state in states.into_iter().chain(["stalled", "degraded"]) {
            assert!(table.contains_key(format!("state_{state}").as_str()), "{state}");
        }
        for trust in qwen_engine::Trust::ALL {
            assert!(table.contains_key(format!("trust_{}", trust.name()).as_str()), "{trust:?}");
        }
        for health in ["ok", "degraded", "throttled", "unresponsive", "lost", "unknown"] {
            assert!(table.contains_key(format!("health_{health}").as_str()), "{health}");
        }
        for state in [qwen_engine::KvState::Free, qwen_engine::KvState::Used, qwen_engine::KvState::Cached] {
            assert!(table.contains_key(format!("kv_{}", state.name()).as_str()), "{state:?}");
        }
    }
}
