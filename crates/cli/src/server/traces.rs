//! Where spans go: a setting of the server, else the variables of OpenTelemetry.

use crate::error::CliError;

/// Path of spans below a collector's URL.
const PATH: &str = "/v1/traces";
/// The setting, as errors name it.
const SETTING: &str = "--otlp_endpoint";
/// A collector of spans, taken as it is.
const TRACES: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
/// A collector of everything.
const BASE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// The URL that spans are sent to: that of the setting or of `OTEL_EXPORTER_OTLP_ENDPOINT` with the path of spans put to it, or
/// that of `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` as it is.
pub(super) fn endpoint(setting: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let (source, url) = given(setting, variable)?;
    if source == TRACES {
        return Some(url);
    }
    // What follows the path stays behind it: some collectors take a key there.
    let (base, rest) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
    let base = base.trim_end_matches('/');
    let path = if base.ends_with(PATH) { "" } else { PATH };
    Some(format!("{base}{path}{rest}"))
}

/// Which setting or variable says it.
pub(super) fn source(setting: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> &'static str {
    given(setting, variable).map_or(SETTING, |(source, _)| source)
}

/// The error if it is no URL. What it is instead may hold a password and is not told.
pub(super) fn no_url(source: &str) -> CliError {
    let help = "mend it, or leave it out to send no spans";
    CliError::input(source, "a URL such as http://127.0.0.1:4318", "a text that is none of http or https", help)
}

/// What is given, and where. The setting alone holds whatever OpenTelemetry's variables say: they may be there for all programs
/// of a machine.
fn given(setting: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    // An empty variable is one that is not set, as the specification has it.
    let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
    let says = |name: &str, word: &str| variable(name).is_some_and(|text| text.trim().eq_ignore_ascii_case(word));
    if let Some(url) = filled(setting.map(str::to_owned)) {
        return Some((SETTING, url));
    }
    if says("OTEL_SDK_DISABLED", "true") || says("OTEL_TRACES_EXPORTER", "none") {
        return None;
    }
    [TRACES, BASE].into_iter().find_map(|name| Some((name, filled(variable(name))?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables of an environment.
    fn of<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    const ALL: (&str, &str) = (BASE, "http://b:4318/");
    const OWN: (&str, &str) = (TRACES, "http://c/spans");

    #[test]
    fn the_setting_comes_before_the_variables() {
        let to = |setting: Option<&str>, variables: &[(&str, &str)]| endpoint(setting, of(variables));
        assert_eq!(to(None, &[]), None);
        assert_eq!(to(None, &[(BASE, "")]), None);
        assert_eq!(to(None, &[ALL]).as_deref(), Some("http://b:4318/v1/traces"));
        assert_eq!(to(None, &[ALL, OWN]).as_deref(), Some("http://c/spans"));
        assert_eq!(to(None, &[(TRACES, "http://c/spans/")]).as_deref(), Some("http://c/spans/"));
        assert_eq!(to(Some("http://a:4318"), &[ALL, OWN]).as_deref(), Some("http://a:4318/v1/traces"));
        assert_eq!(to(Some("http://a/v1/traces"), &[]).as_deref(), Some("http://a/v1/traces"));
        assert_eq!(to(Some("http://a/in/?key=x/y"), &[]).as_deref(), Some("http://a/in/v1/traces?key=x/y"));
        assert_eq!(to(Some("http://a/v1/traces/?key=x"), &[]).as_deref(), Some("http://a/v1/traces?key=x"));
        assert_eq!(to(None, &[(BASE, "http://b?key=x#y")]).as_deref(), Some("http://b/v1/traces?key=x#y"));
    }

    #[test]
    fn variables_turn_variables_off() {
        for off in [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(endpoint(None, of(&[ALL, OWN, off])), None, "{off:?}");
            assert!(endpoint(Some("http://a"), of(&[off])).is_some(), "{off:?}");
        }
        for on in [("OTEL_SDK_DISABLED", "false"), ("OTEL_TRACES_EXPORTER", "otlp")] {
            assert!(endpoint(None, of(&[ALL, on])).is_some(), "{on:?}");
        }
    }

    #[test]
    fn an_error_names_where_it_was_said() {
        assert_eq!(source(Some("a"), of(&[ALL])), "--otlp_endpoint");
        assert_eq!(source(None, of(&[ALL])), "OTEL_EXPORTER_OTLP_ENDPOINT");
        assert_eq!(source(None, of(&[ALL, OWN])), "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        assert!(no_url(BASE).to_string().starts_with("OTEL_EXPORTER_OTLP_ENDPOINT: expected a URL"));
    }
}
