package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/licenseclassifier/v2/assets"
)

// licenseFile matches the names of files that hold the license of a module.
var licenseFile = regexp.MustCompile(`(?i)^(licen[sc]e|copying)([.-].*)?$`)

// licensesOf returns the licenses of Go modules, which are PATH@VERSION: those of which the module's own files have the text.
func licensesOf(modules []string) (map[string]*cdx.Licenses, error) {
	classifier, err := assets.DefaultClassifier()
	if err != nil {
		return nil, err
	}
	list, err := exec.Command("go", append([]string{"mod", "download", "-json"}, modules...)...).Output()
	if err != nil {
		return nil, fmt.Errorf("go mod download: %w: %s", err, list)
	}
	out := map[string]*cdx.Licenses{}
	for in := json.NewDecoder(bytes.NewReader(list)); ; {
		var m struct{ Path, Version, Dir string }
		if err := in.Decode(&m); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, err
		}
		entries, err := os.ReadDir(m.Dir)
		if err != nil {
			return nil, err
		}
		var names []string
		for _, e := range entries {
			if !licenseFile.MatchString(e.Name()) {
				continue
			}
			text, err := os.ReadFile(filepath.Join(m.Dir, e.Name()))
			if err != nil {
				return nil, err
			}
			for _, found := range classifier.Match(text).Matches {
				if found.MatchType == "License" {
					names = append(names, found.Name)
				}
			}
		}
		if len(names) == 0 {
			return nil, fmt.Errorf("%s@%s: no license that is known in %s", m.Path, m.Version, m.Dir)
		}
		slices.Sort(names)
		out[m.Path+"@"+m.Version] = licenses(slices.Compact(names)...)
	}
}

func licenses(names ...string) *cdx.Licenses {
	var out cdx.Licenses
	for _, name := range names {
		out = append(out, cdx.LicenseChoice{License: &cdx.License{ID: name}})
	}
	return &out
}

// debianLicense finds the name of a license in a paragraph of a copyright file, and debianFiles matches paragraphs about files. Others have
// the text of a license, to which these refer.
var (
	debianLicense = regexp.MustCompile(`(?m)^License:[ \t]*(\S.*)$`)
	debianFiles   = regexp.MustCompile(`(?m)^(Format|Files):`)
	emptyLine     = regexp.MustCompile(`\n[ \t]*\n`)
)

// debianLicenses returns the licenses that a copyright file of Debian names for files of its source package, whether or not they are part of
// the binary one: with the identifier of SPDX, where there is one, and else as Debian calls them. It is nil if the file is prose.
// See https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/.
func debianLicenses(copyright string) *cdx.Licenses {
	if !strings.HasPrefix(copyright, "Format:") {
		return nil
	}
	var found []cdx.License
	for _, paragraph := range emptyLine.Split(copyright, -1) {
		if m := debianLicense.FindStringSubmatch(paragraph); m != nil && debianFiles.MatchString(paragraph) {
			found = append(found, spdx(strings.TrimSpace(m[1])))
		}
	}
	slices.SortFunc(found, func(a, b cdx.License) int { return cmp.Compare(a.ID+a.Name, b.ID+b.Name) })
	var out cdx.Licenses
	for _, l := range slices.Compact(found) {
		out = append(out, cdx.LicenseChoice{License: &l})
	}
	if out == nil {
		return nil
	}
	return &out
}

// gnu matches what Debian calls licenses of GNU, of which it leaves out a last ".0", and adds "+" if later versions may be chosen.
var gnu = regexp.MustCompile(`^(GPL|LGPL)-(\d)(\.\d)?(\+)?$`)

// others are licenses that are not GNU's, by Debian's names, with the identifiers of SPDX.
var others = map[string]string{
	"Apache-2.0": "Apache-2.0", "BSD-2-clause": "BSD-2-Clause", "BSD-3-clause": "BSD-3-Clause", "Expat": "MIT", "FSFAP": "FSFAP", "FSFUL": "FSFUL",
	"FSFULLR": "FSFULLR", "ISC": "ISC", "zlib": "Zlib",
}

// spdx returns the license that Debian calls by a name.
func spdx(name string) cdx.License {
	if m := gnu.FindStringSubmatch(name); m != nil {
		suffix := "-only"
		if m[4] != "" {
			suffix = "-or-later"
		}
		return cdx.License{ID: m[1] + "-" + m[2] + cmp.Or(m[3], ".0") + suffix}
	}
	if id := others[name]; id != "" {
		return cdx.License{ID: id}
	}
	return cdx.License{Name: name}
}
