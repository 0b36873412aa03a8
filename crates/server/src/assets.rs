//! Files that the server carries: what lies in `web/` goes into the table below and is served under `/web/`, `index.html` as
//! the start page too. Nothing is read from disk while the server runs, so no path of a client reaches a file.

use axum::extract::Path;
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};

use crate::error::{ApiError, Kind};

/// Name, type, contents.
const FILES: &[(&str, &str, &[u8])] =
    &[("index.html", "text/html; charset=utf-8", include_bytes!("../web/index.html"))];

/// The page loads nothing from elsewhere and is loaded by nobody.
const POLICY: &str = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'; \
                      base-uri 'none'; form-action 'none'";

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
