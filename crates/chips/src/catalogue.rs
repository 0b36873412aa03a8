//! All sheets: those that are part of the program, and those of a folder, which replace built-in ones of the same name.

use std::path::Path;
use std::sync::OnceLock;

use toml::Table;

use crate::check::check;
use crate::error::ChipError;
use crate::sheet::Chip;

/// Longer files are not sheets.
pub const MAX_SHEET_BYTES: u64 = 256 << 10;
/// Characters of what a parser says.
const MAX_MESSAGE: usize = 300;
/// More files in a folder are not sheets.
pub const MAX_SHEETS: usize = 256;

macro_rules! sheets {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../../chips/", $name, ".toml")))),*]
    };
}

/// The files of `chips/`.
const BUILT_IN: &[(&str, &str)] = sheets! {
    "ascend910b1" "ascend910b3" "ascend910b4" "bi-v100" "bi-v150" "br100" "br104" "cpu" "cuda" "dcu-k100" "dcu-k100-ai" "dcu-z100"
    "gcu-i20" "gcu-s60" "gcu-t21" "mlu370" "mtt-s4000" "opencl"
};

/// Sheets, by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Catalogue {
    chips: Vec<Chip>,
}

impl Catalogue {
    /// The sheets that are part of the program.
    ///
    /// # Errors
    /// None in a program whose tests passed.
    pub fn built_in() -> Result<Self, ChipError> {
        let mut catalogue = Self { chips: Vec::new() };
        for (name, text) in BUILT_IN {
            let origin = format!("chips/{name}.toml");
            catalogue.add(&origin, parse(&origin, text)?)?;
        }
        Ok(catalogue)
    }

    /// The same, and the `*.toml` of a folder: a sheet replaces the built-in one of its name.
    ///
    /// # Errors
    /// If the folder cannot be read, or one of its sheets is refused.
    pub fn with_folder(folder: &Path) -> Result<Self, ChipError> {
        let read = |path: &Path, error: &std::io::Error| ChipError::Read { path: path.into(), what: error.to_string() };
        let entries = std::fs::read_dir(folder).map_err(|error| read(folder, &error))?;
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| read(folder, &error))?.path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                paths.push(path);
            }
            if paths.len() > MAX_SHEETS {
                let what = format!("expected at most {MAX_SHEETS} sheets in a folder");
                return Err(ChipError::Read { path: folder.into(), what });
            }
        }
        // An order that does not depend on the file system.
        paths.sort();
        let mut own = Self { chips: Vec::new() };
        let mut origins = Vec::new();
        for path in paths {
            let meta = std::fs::metadata(&path).map_err(|error| read(&path, &error))?;
            if !meta.is_file() || meta.len() > MAX_SHEET_BYTES {
                let what = format!("expected a file of at most {MAX_SHEET_BYTES} bytes, found {} bytes", meta.len());
                return Err(ChipError::Read { path, what });
            }
            let text = std::fs::read_to_string(&path).map_err(|error| read(&path, &error))?;
            let origin = path.display().to_string();
            own.add(&origin, parse(&origin, &text)?)?;
            origins.push(origin);
        }
        let mut catalogue = Self::built_in()?;
        catalogue.chips.retain(|chip| own.chips.iter().all(|own| own.name != chip.name));
        for (chip, origin) in own.chips.into_iter().zip(origins) {
            catalogue.add(&origin, chip)?;
        }
        Ok(catalogue)
    }

    fn add(&mut self, origin: &str, chip: Chip) -> Result<(), ChipError> {
        for name in std::iter::once(&chip.name).chain(&chip.aliases) {
            if let Some(other) = self.find(name) {
                let (name, other) = (name.clone(), other.name.clone());
                return Err(ChipError::Duplicate { origin: origin.to_owned(), name, other });
            }
        }
        let place = self.chips.partition_point(|other| other.name < chip.name);
        self.chips.insert(place, chip);
        Ok(())
    }

    /// All chips, in order of their names.
    #[must_use]
    pub fn all(&self) -> &[Chip] {
        &self.chips
    }

    /// The chip of a name or alias.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Chip> {
        self.chips.iter().find(|chip| chip.name == name || chip.aliases.iter().any(|alias| alias == name))
    }

    /// The chip of a name or alias.
    ///
    /// # Errors
    /// If there is none; the message names those that there are.
    pub fn get(&self, name: &str) -> Result<&Chip, ChipError> {
        self.find(name).ok_or_else(|| ChipError::Unknown {
            name: name.to_owned(),
            known: self.chips.iter().map(|chip| chip.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    /// The chip that a device is, from the name of its plugin, its own name and its fingerprint: the sheet whose `matches` fits best, else
    /// the sheet that is called like the plugin.
    #[must_use]
    pub fn recognise(&self, plugin: &str, texts: &[&str]) -> Option<&Chip> {
        let length = |chip: &Chip| {
            let fits = |pattern: &&String| texts.iter().any(|text| text.starts_with(pattern.as_str()));
            chip.matches.iter().filter(fits).map(String::len).max()
        };
        let best = self.chips.iter().filter(|chip| chip.plugin == plugin);
        let best = best.filter_map(|chip| Some((length(chip)?, chip))).max_by_key(|(length, _)| *length);
        best.map(|(_, chip)| chip).or_else(|| self.find(plugin))
    }
}

impl Chip {
    /// The built-in chip of a name or alias.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        Self::built_in().and_then(|catalogue| catalogue.find(name))
    }

    /// The built-in chips, in order of their names.
    #[must_use]
    pub fn all() -> &'static [Self] {
        Self::built_in().map_or(&[], Catalogue::all)
    }

    fn built_in() -> Option<&'static Catalogue> {
        static BUILT_IN: OnceLock<Option<Catalogue>> = OnceLock::new();
        // A test reads them all, so a program has them.
        BUILT_IN.get_or_init(|| Catalogue::built_in().ok()).as_ref()
    }
}

/// Reads one sheet; `origin` names it in messages.
///
/// # Errors
/// [`ChipError::Sheet`] with the place, what was expected and what was found.
pub fn parse(origin: &str, text: &str) -> Result<Chip, ChipError> {
    let refuse = |what: String| ChipError::Sheet { origin: origin.to_owned(), what };
    if text.len() as u64 > MAX_SHEET_BYTES {
        return Err(refuse(format!("expected at most {MAX_SHEET_BYTES} bytes, found {}", text.len())));
    }
    let syntax = |error: &toml::de::Error| {
        let line = error.span().map(|span| 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count());
        // What is wrong may be of any length, such as the name of an unknown key.
        let message: String = error.message().replace('\n', ", ").chars().take(MAX_MESSAGE).collect();
        refuse(line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}")))
    };
    let table: Table = toml::from_str(text).map_err(|error| syntax(&error))?;
    let chip: Chip = toml::from_str(text).map_err(|error| syntax(&error))?;
    check(&table, &chip).map_err(refuse)?;
    Ok(chip)
}
