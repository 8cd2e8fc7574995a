package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/textproto"
	"net/url"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// materials writes the bill of materials, in the format of CycloneDX: the Go modules and the standard library that the binaries are
// made of, which the binaries themselves tell, with the licenses of the modules, and the Debian packages in the images, as dpkg described them,
// with the licenses that their copyright files name.
func (r *release) materials() error {
	const program, image = "nodeproxy", "image"
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: r.epoch.Format(time.RFC3339),
		Component: &cdx.Component{BOMRef: program, Type: cdx.ComponentTypeApplication, Name: "nodeproxy", Version: r.number(), Licenses: licenses("Apache-2.0")},
	}
	components := map[string]cdx.Component{image: {BOMRef: image, Type: cdx.ComponentTypeContainer, Name: r.image, Version: r.digest}}
	needs := map[string]map[string]bool{program: {}, image: {program: true}}
	add := func(of string, c cdx.Component) {
		components[c.BOMRef] = c
		needs[of][c.BOMRef] = true
	}
	for _, b := range r.binaries {
		content, err := os.ReadFile(b.file)
		if err != nil {
			return err
		}
		info, err := buildinfo.Read(bytes.NewReader(content))
		if err != nil {
			return fmt.Errorf("%s: %w", b.file, err)
		}
		ref := program + "-linux-" + b.name
		add(image, cdx.Component{
			BOMRef: ref, Type: cdx.ComponentTypeFile, Name: ref, Version: r.number(),
			Hashes: hashes(fmt.Sprintf("%x", sha256.Sum256(content))),
		})
		std := library("pkg:golang/std@"+strings.TrimPrefix(info.GoVersion, "go"), "std", strings.TrimPrefix(info.GoVersion, "go"))
		std.Licenses = licenses("BSD-3-Clause")
		add(program, std)
		var modules []cdx.Component
		var withSum []string
		for _, m := range info.Deps {
			c, err := moduleComponent(m)
			if err != nil {
				return fmt.Errorf("%s: %w", b.file, err)
			}
			if modules = append(modules, c); c.Hashes != nil {
				withSum = append(withSum, c.Name+"@"+c.Version)
			}
		}
		known, err := licensesOf(withSum)
		if err != nil {
			return fmt.Errorf("%s: %w", b.file, err)
		}
		for _, c := range modules {
			c.Licenses = known[c.Name+"@"+c.Version]
			add(program, c)
		}
	}
	for _, root := range r.roots {
		packages, err := debianPackages(root.file)
		if err != nil {
			return fmt.Errorf("%s: %w", root.file, err)
		}
		for _, p := range packages {
			add(image, p)
		}
	}

	sorted := slices.SortedFunc(maps.Values(components), func(a, b cdx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	bom.Components = &sorted
	var dependencies []cdx.Dependency
	for _, ref := range slices.Sorted(maps.Keys(needs)) {
		on := slices.Sorted(maps.Keys(needs[ref]))
		dependencies = append(dependencies, cdx.Dependency{Ref: ref, Dependencies: &on})
	}
	bom.Dependencies = &dependencies
	var out bytes.Buffer
	encoder := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON)
	if err := encoder.SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return err
	}
	return r.write(fmt.Sprintf("nodeproxy-%s.cdx.json", r.version), out.Bytes())
}

func library(purl, name, version string) cdx.Component {
	return cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: name, Version: version, PackageURL: purl}
}

func hashes(hex string) *[]cdx.Hash { return &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex}} }

// moduleComponent describes a Go module. The hash is that of go.sum, which is one of SHA-256 over the module's files.
func moduleComponent(m *debug.Module) (cdx.Component, error) {
	if m.Replace != nil {
		m = m.Replace
	}
	c := library("pkg:golang/"+m.Path+"@"+url.QueryEscape(m.Version), m.Path, m.Version)
	if m.Sum == "" {
		return c, nil // replaced by a directory
	}
	sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
	if err != nil {
		return c, fmt.Errorf("the sum of %s: %w", m.Path, err)
	}
	c.Hashes = hashes(fmt.Sprintf("%x", sum))
	return c, nil
}

// debianPackages reads var/lib/dpkg/status.d of a root file system, and the copyright files of these packages; see deploy/image/root.
func debianPackages(file string) ([]cdx.Component, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const docs = "/usr/share/doc"
	var out []cdx.Component
	copyrights := map[string][]byte{} // by directory
	links := map[string]string{}      // directories that are another's
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		switch name := path.Clean("/" + h.Name); {
		case h.Typeflag == tar.TypeSymlink && path.Dir(name) == docs:
			links[name] = path.Join(docs, h.Linkname)
		case h.Typeflag == tar.TypeReg && path.Base(name) == "copyright" && path.Dir(path.Dir(name)) == docs:
			if copyrights[path.Dir(name)], err = io.ReadAll(in); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		case h.Typeflag == tar.TypeReg && path.Dir(name) == "/var/lib/dpkg/status.d":
			c, err := debianPackage(in)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			out = append(out, c)
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no packages")
	}
	for i, c := range out {
		dir := path.Join(docs, c.Name)
		text, ok := copyrights[cmp.Or(links[dir], dir)]
		if !ok {
			return nil, fmt.Errorf("%s: no copyright file", c.Name)
		}
		out[i].Licenses = debianLicenses(string(text))
	}
	return out, nil
}

// debianPackage reads what dpkg knows of a package.
func debianPackage(status io.Reader) (cdx.Component, error) {
	// The fields of a package are like those of a mail, of which an empty line is the end.
	text := io.MultiReader(status, strings.NewReader("\n\n"))
	fields, err := textproto.NewReader(bufio.NewReader(text)).ReadMIMEHeader()
	if err != nil {
		return cdx.Component{}, err
	}
	pkg, version, arch := fields.Get("Package"), fields.Get("Version"), fields.Get("Architecture")
	if pkg == "" || version == "" || arch == "" {
		return cdx.Component{}, errors.New("no package, version or architecture")
	}
	purl := fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", url.PathEscape(pkg), url.QueryEscape(version), arch)
	return library(purl, pkg, version), nil
}
