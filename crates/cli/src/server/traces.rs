//! Where spans go: a setting of the server, else the variables of OpenTelemetry.

/// Path of spans below a collector's URL.
const PATH: &str = "/v1/traces";

/// The URL that spans are sent to: that of the setting or of `OTEL_EXPORTER_OTLP_ENDPOINT` with the path of spans put to it, or
/// that of `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` as it is.
pub(super) fn endpoint(setting: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let below = |base: String| match base.trim_end_matches('/') {
        base if base.ends_with(PATH) => base.to_owned(),
        base => format!("{base}{PATH}"),
    };
    given(setting.map(str::to_owned))
        .map(below)
        .or_else(|| given(variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")))
        .or_else(|| given(variable("OTEL_EXPORTER_OTLP_ENDPOINT")).map(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_comes_before_the_variables() {
        let of = |setting: Option<&str>, variables: &[(&str, &str)]| {
            endpoint(setting, |name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:4318/");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c/spans");
        assert_eq!(of(None, &[]), None);
        assert_eq!(of(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]), None);
        assert_eq!(of(None, &[base]).as_deref(), Some("http://b:4318/v1/traces"));
        assert_eq!(of(None, &[base, own]).as_deref(), Some("http://c/spans"));
        assert_eq!(of(Some("http://a:4318"), &[base, own]).as_deref(), Some("http://a:4318/v1/traces"));
        assert_eq!(of(Some("http://a/v1/traces"), &[]).as_deref(), Some("http://a/v1/traces"));
    }
}
