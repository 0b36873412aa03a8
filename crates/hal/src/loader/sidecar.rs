//! The manifest beside a library, read before the library is opened: `libhal_NAME.toml`.
//!
//! In: bytes that a vendor or a user wrote. Out: facts, or the reason why the file is refused. The library states the
//! same facts, and both must agree.

use std::path::{Path, PathBuf};

use qwen_hal_abi::{
    QHAL_CPU_AVX2, QHAL_CPU_AVX512, QHAL_CPU_NEON, QHAL_KIND_CPU, QHAL_KIND_GPU, QHAL_KIND_NPU, QHAL_KIND_NULL,
    QHAL_KIND_SIMULATED,
};
use serde::Deserialize;

use super::LoadError;
use crate::plugin::{Manifest, check_versions};

/// Longer files are not manifests.
const MAX_BYTES: u64 = 64 << 10;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    #[serde(default)]
    vendor: String,
    #[serde(default)]
    version: String,
    abi: String,
    min_host_minor: u32,
    kind: Option<String>,
    os: Option<String>,
    arch: Option<String>,
    #[serde(default)]
    cpu_features: Vec<String>,
    #[serde(default)]
    score: u32,
}

/// What a manifest file states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sidecar {
    /// The file.
    pub path: PathBuf,
    /// Short name, as in `--device name:index`.
    pub name: String,
    /// Vendor, for people; empty if not stated.
    pub vendor: String,
    /// Version of the plugin; empty if not stated.
    pub version: String,
    /// ABI (major, minor) that the plugin was built with.
    pub abi: (u32, u32),
    /// Oldest host minor that it accepts.
    pub min_host_minor: u32,
    /// `QHAL_KIND_*`, 0 if not stated.
    pub kind: u32,
    /// Rank among plugins of the same name.
    pub score: u32,
}

impl Sidecar {
    /// Where the manifest of a library lies.
    #[must_use]
    pub fn path_of(library: &Path) -> PathBuf {
        library.with_extension("toml")
    }

    /// Reads the manifest of a library, if there is one, and checks that this machine and host may use the library.
    ///
    /// # Errors
    /// [`LoadError::Sidecar`] if the file cannot be understood; [`LoadError::Platform`] or a version refusal else.
    pub fn read(library: &Path) -> Result<Option<Self>, LoadError> {
        let path = Self::path_of(library);
        let invalid = |what: String| LoadError::Sidecar { path: path.clone(), what };
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(invalid(error.to_string())),
            Ok(meta) if meta.len() > MAX_BYTES => {
                return Err(invalid(format!("expected at most {MAX_BYTES} bytes, found {}", meta.len())));
            }
            Ok(_) => {}
        }
        let text = std::fs::read_to_string(&path).map_err(|error| invalid(error.to_string()))?;
        Self::parse(&path, &text).map(Some)
    }

    /// Understands the text of a manifest file.
    ///
    /// # Errors
    /// As [`Sidecar::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, LoadError> {
        let invalid = |what: String| LoadError::Sidecar { path: path.to_owned(), what };
        let text: Text =
            toml::from_str(text).map_err(|error| invalid(error.to_string().trim_end().replace('\n', " ")))?;
        if text.name.is_empty() || !text.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
            return Err(invalid(format!("name: expected letters, digits, - and _, found {:?}", text.name)));
        }
        let abi = text.abi.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let abi: (u32, u32) =
            abi.ok_or_else(|| invalid(format!("abi: expected \"major.minor\", found {:?}", text.abi)))?;
        let kind = match text.kind.as_deref() {
            None => 0,
            Some("cpu") => QHAL_KIND_CPU,
            Some("gpu") => QHAL_KIND_GPU,
            Some("npu") => QHAL_KIND_NPU,
            Some("simulated") => QHAL_KIND_SIMULATED,
            Some("null") => QHAL_KIND_NULL,
            Some(other) => {
                return Err(invalid(format!("kind: expected cpu, gpu, npu, simulated or null, found {other:?}")));
            }
        };
        let mut cpu_features = 0;
        for feature in &text.cpu_features {
            cpu_features |= match feature.as_str() {
                "avx2" => QHAL_CPU_AVX2,
                "avx512" => QHAL_CPU_AVX512,
                "neon" => QHAL_CPU_NEON,
                other => return Err(invalid(format!("cpu_features: expected avx2, avx512 or neon, found {other:?}"))),
            };
        }
        for (what, wanted, here) in
            [("os", &text.os, std::env::consts::OS), ("arch", &text.arch, std::env::consts::ARCH)]
        {
            if let Some(wanted) = wanted.as_deref().filter(|wanted| *wanted != here) {
                return Err(LoadError::Platform {
                    path: path.to_owned(),
                    expected: format!("{what} {here}"),
                    found: wanted.to_owned(),
                });
            }
        }
        check_versions(&text.name, abi.0, text.min_host_minor, cpu_features)?;
        Ok(Self {
            path: path.to_owned(),
            name: text.name,
            vendor: text.vendor,
            version: text.version,
            abi,
            min_host_minor: text.min_host_minor,
            kind,
            score: text.score,
        })
    }

    /// Compares with what the library says.
    pub(super) fn agrees(&self, library: &Path, manifest: &Manifest) -> Result<(), LoadError> {
        let disagree = |what: &'static str, sidecar: String, found: String| LoadError::Disagrees {
            path: library.to_owned(),
            what,
            sidecar,
            library: found,
        };
        if self.name != manifest.name {
            return Err(disagree("name", self.name.clone(), manifest.name.clone()));
        }
        if !self.version.is_empty() && self.version != manifest.version {
            return Err(disagree("version", self.version.clone(), manifest.version.clone()));
        }
        if self.abi != manifest.abi {
            return Err(disagree("abi", format!("{:?}", self.abi), format!("{:?}", manifest.abi)));
        }
        if self.min_host_minor != manifest.min_host_minor {
            return Err(disagree(
                "min_host_minor",
                self.min_host_minor.to_string(),
                manifest.min_host_minor.to_string(),
            ));
        }
        if self.kind != 0 && self.kind != manifest.kind {
            return Err(disagree("kind", self.kind.to_string(), manifest.kind.to_string()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "name = \"x\"\nabi = \"0.1\"\nmin_host_minor = 1\n";

    fn parse(text: &str) -> Result<Sidecar, LoadError> {
        Sidecar::parse(Path::new("/plugins/libhal_x.toml"), text)
    }

    #[test]
    fn good_and_bad_manifests() {
        let good = parse(GOOD).unwrap();
        assert_eq!((good.name.as_str(), good.abi, good.min_host_minor), ("x", (0, 1), 1));
        let with = |line: &str| parse(&format!("{GOOD}{line}\n")).unwrap_err().to_string();
        for (line, part) in [
            ("kind = \"dog\"", "simulated or null"),
            ("cpu_features = [\"mmx\"]", "avx512 or neon"),
            ("os = \"plan9\"", "plan9"),
            ("arch = \"vax\"", "vax"),
            ("colour = 1", "colour"),
            ("kind = 3", "string"),
        ] {
            assert!(with(line).contains(part), "{line}: {}", with(line));
        }
        for (text, part) in [
            ("", "name"),
            ("name = \"x\"\nabi = \"1\"\nmin_host_minor = 0", "major.minor"),
            ("name = \"../x\"\nabi = \"0.1\"\nmin_host_minor = 0", "letters"),
            ("name = \"x\"\nabi = \"9.0\"\nmin_host_minor = 0", "ABI major 0"),
            ("name = \"x\"\nabi = \"0.99\"\nmin_host_minor = 99", "needs 99"),
            ("\u{0}", "libhal_x.toml"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
        // Built with a newer minor, but content with this one.
        parse("name = \"x\"\nabi = \"0.99\"\nmin_host_minor = 0").unwrap();
    }
}
