package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"

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
