package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	godigest "github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"nodeproxy/deploy/oci"
)

const (
	name  = "localhost/nodeproxy" // what the input of these tests calls the image
	image = "registry.example.org/np/nodeproxy"
)

var digestOfImage = "sha256:" + strings.Repeat("0123456789abcdef", 4)

// copyright is a copyright file of Debian.
const copyright = `Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
License:
 A summary.

Files: *
Copyright: Somebody
License: GPL-2+
 Text of it.
 .
 License: this is no field

Files: a b
License: Expat

Files: c
License: Artistic or GPL-1+

Files: d
License: Expat

License: Apache-2.0
 Text that nothing refers to.
`

// input writes what a release is made of into a directory.
func input(t *testing.T) release {
	t.Helper()
	dir := t.TempDir()
	put := func(name, content string) string {
		file := filepath.Join(dir, name)
		require.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(content), 0o600)))
		return file
	}
	put("chart/values.yaml", "# Values.\nimage:\n  repository: localhost/nodeproxy # no more\n  tag: \"\"\n")
	put("chart/Chart.yaml", "name: nodeproxy\nversion: 0.0.0\nappVersion: latest\nannotations:\n  nodeproxy/image-digest: \"\"\n")
	put("chart/templates/a.yaml", "a: b\n")
	self, err := os.Executable()
	require.NoError(t, err)
	root, err := oci.Tar([]oci.File{
		oci.Regular("./var/lib/dpkg/status.d/libgcc-s1", []byte("Package: libgcc-s1\nVersion: 12\nArchitecture: amd64\n")),
		oci.Regular("var/lib/dpkg/status.d/libstdc++6", []byte("Package: libstdc++6\nVersion: 1:2.0+deb12u1-3\nArchitecture: amd64\n"+
			"Description: a library\n of several lines\n .\n and paragraphs\n")),
		oci.Regular("var/lib/dpkg/status.d/prose", []byte("Package: prose\nVersion: 1\nArchitecture: all\n")),
		{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "./usr/share/doc/libgcc-s1", Linkname: "libstdc++6"}},
		oci.Regular("./usr/share/doc/libstdc++6/copyright", []byte(copyright)),
		oci.Regular("usr/share/doc/prose/copyright", []byte("This is free software.\nLicense: see elsewhere\n")),
	}, time.Now())
	require.NoError(t, err)
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	out := filepath.Join(dir, "out")
	require.NoError(t, os.Mkdir(out, 0o755))
	return release{
		version: "v1.2.3", image: image, digest: digestOfImage, name: name, output: out, chart: filepath.Join(dir, "chart"),
		manifests: []pair{{"install-iptables", put("iptables.yaml", "a: b\n    image: localhost/nodeproxy:latest\n---\n  - image: localhost/nodeproxy:latest\n")}},
		binaries:  []pair{{runtime.GOARCH, self}}, roots: []pair{{"amd64", put("root.tar", string(root))}},
	}
}

// made makes a release, and returns its files.
func made(t *testing.T) map[string][]byte {
	t.Helper()
	r := input(t)
	require.NoError(t, r.run())
	out := map[string][]byte{}
	entries, err := os.ReadDir(r.output)
	require.NoError(t, err)
	for _, e := range entries {
		if out[e.Name()], err = os.ReadFile(filepath.Join(r.output, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// unpack reads a tar archive.
func unpack(t *testing.T, archive io.Reader) map[string]oci.File {
	t.Helper()
	out := map[string]oci.File{}
	for in := tar.NewReader(archive); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		content, err := io.ReadAll(in)
		require.NoError(t, err)
		out[h.Name] = oci.File{Header: *h, Content: content}
	}
}

func TestRelease(t *testing.T) {
	files := made(t)
	if !maps.EqualFunc(files, made(t), bytes.Equal) { // from other directories, at another time
		t.Error("two releases of the same differ")
	}

	names := slices.Sorted(maps.Keys(files))
	if want := []string{"install-iptables.yaml", "nodeproxy-1.2.3.tgz", "nodeproxy-chart-v1.2.3.oci.tar", "nodeproxy-v1.2.3.cdx.json"}; !slices.Equal(names, want) {
		t.Fatalf("files %q, want %q", names, want)
	}
	pinned := image + "@" + digestOfImage
	if want := "a: b\n    image: " + pinned + "\n---\n  - image: " + pinned + "\n"; !strings.HasSuffix(string(files["install-iptables.yaml"]), "\n"+want) {
		t.Errorf("manifests:\n%s", files["install-iptables.yaml"])
	}
}

func TestChart(t *testing.T) {
	files := made(t)
	tarball := files["nodeproxy-1.2.3.tgz"]
	z, err := gzip.NewReader(bytes.NewReader(tarball))
	require.NoError(t, err)
	if z.Name != "" || !z.ModTime.IsZero() {
		t.Errorf("the header of gzip has the name %q and the time %v", z.Name, z.ModTime)
	}
	chart := unpack(t, z)
	if len(chart) != 3 {
		t.Errorf("files %q", slices.Sorted(maps.Keys(chart)))
	}
	for name, f := range chart {
		if h := f.Header; h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Mode != 0o644 || h.ModTime.Unix() != 1700000000 || !strings.HasPrefix(name, "nodeproxy/") {
			t.Errorf("%s: %+v", name, h)
		}
	}
	var about struct {
		Version, AppVersion string
		Annotations         map[string]string
	}
	require.NoError(t, yaml.Unmarshal(chart["nodeproxy/Chart.yaml"].Content, &about))
	if about.Version != "1.2.3" || about.AppVersion != "v1.2.3" || about.Annotations["nodeproxy/image-digest"] != digestOfImage {
		t.Errorf("Chart.yaml: %+v", about)
	}
	if got, want := string(chart["nodeproxy/values.yaml"].Content), "# Values.\nimage:\n  repository: "+image+"\n  tag: \"\"\n"; got != want {
		t.Errorf("values.yaml:\n%s", got)
	}

	layout := unpack(t, bytes.NewReader(files["nodeproxy-chart-v1.2.3.oci.tar"]))
	get := func(d v1.Descriptor) []byte {
		t.Helper()
		content := layout[oci.Path(d)].Content
		if godigest.FromBytes(content) != d.Digest || int64(len(content)) != d.Size {
			t.Fatalf("%+v: %d bytes with digest %s", d, len(content), godigest.FromBytes(content))
		}
		return content
	}
	var index v1.Index
	var m v1.Manifest
	var metadata map[string]any
	into := func(content []byte, v any) {
		t.Helper()
		require.NoError(t, json.Unmarshal(content, v))
	}
	into(layout["index.json"].Content, &index)
	into(get(index.Manifests[0]), &m)
	into(get(m.Config), &metadata)
	if index.Manifests[0].Annotations[v1.AnnotationRefName] != "1.2.3" || m.Config.MediaType != chartConfigType || len(m.Layers) != 1 ||
		m.Layers[0].MediaType != chartLayerType || !bytes.Equal(get(m.Layers[0]), tarball) || metadata["version"] != "1.2.3" {
		t.Errorf("index %+v, manifest %+v, configuration %v", index, m, metadata)
	}
}

func TestMaterials(t *testing.T) {
	var bom cdx.BOM
	require.NoError(t, cdx.NewBOMDecoder(bytes.NewReader(made(t)["nodeproxy-v1.2.3.cdx.json"]), cdx.BOMFileFormatJSON).Decode(&bom))
	byRef := map[string]cdx.Component{}
	for _, c := range *bom.Components {
		byRef[c.BOMRef] = c
	}
	needs := map[string][]string{}
	for _, d := range *bom.Dependencies {
		needs[d.Ref] = *d.Dependencies
		for _, ref := range append(*d.Dependencies, d.Ref) {
			if _, ok := byRef[ref]; !ok && ref != bom.Metadata.Component.BOMRef {
				t.Errorf("%s needs %s, which is not described", d.Ref, ref)
			}
		}
	}
	debian, std := "pkg:deb/debian/libstdc++6@1%3A2.0%2Bdeb12u1-3?arch=amd64", "pkg:golang/std@"+strings.TrimPrefix(runtime.Version(), "go")
	if c := byRef[debian]; c.Name != "libstdc++6" || c.Version != "1:2.0+deb12u1-3" || !slices.Contains(needs["image"], debian) {
		t.Errorf("the Debian package is %+v; the image needs %q", c, needs["image"])
	}
	for ref, want := range map[string][]cdx.License{
		debian:                                   {{Name: "Artistic or GPL-1+"}, {ID: "GPL-2.0-or-later"}, {ID: "MIT"}},
		"pkg:deb/debian/libgcc-s1@12?arch=amd64": {{Name: "Artistic or GPL-1+"}, {ID: "GPL-2.0-or-later"}, {ID: "MIT"}},
		"pkg:deb/debian/prose@1?arch=all":        nil,
	} {
		var got []cdx.License
		if l := byRef[ref].Licenses; l != nil {
			for _, choice := range *l {
				got = append(got, *choice.License)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: licenses %v, want %v", ref, got, want)
		}
	}
	if !slices.Contains(needs["nodeproxy"], std) {
		t.Errorf("no %s in %q", std, needs["nodeproxy"])
	}
	modules := 0
	for ref, c := range byRef {
		if strings.HasPrefix(ref, "pkg:golang/github.com/CycloneDX/cyclonedx-go@v") {
			modules++
			if c.Hashes == nil || len((*c.Hashes)[0].Value) != 64 {
				t.Errorf("%s: hashes %v", ref, c.Hashes)
			}
			if c.Licenses == nil || len(*c.Licenses) != 1 || (*c.Licenses)[0].License.ID != "Apache-2.0" {
				t.Errorf("%s: licenses %v", ref, c.Licenses)
			}
		}
	}
	if modules != 1 {
		t.Errorf("%d descriptions of a module that this test is made of", modules)
	}
	if c := byRef["image"]; c.Name != image || c.Version != digestOfImage {
		t.Errorf("image %+v", c)
	}
}

func TestRefused(t *testing.T) {
	put := func(content string) func(*release) {
		return func(r *release) {
			require.NoError(t, os.WriteFile(r.manifests[0].file, []byte(content), 0o644))
		}
	}
	chart := func(file, content string) func(*release) {
		return func(r *release) {
			require.NoError(t, os.WriteFile(filepath.Join(r.chart, file), []byte(content), 0o644))
		}
	}
	root := func(files ...oci.File) func(*release) {
		return func(r *release) {
			content, err := oci.Tar(files, time.Now())
			require.NoError(t, errors.Join(err, os.WriteFile(r.roots[0].file, content, 0o644)))
		}
	}
	for what, c := range map[string]struct {
		change func(*release)
		says   string
	}{
		"no version":             {func(r *release) { r.version = "" }, "semantic version"},
		"version without v":      {func(r *release) { r.version = "1.2.3" }, "semantic version"},
		"no semantic version":    {func(r *release) { r.version = "v1.2" }, "semantic version"},
		"metadata in a version":  {func(r *release) { r.version = "v1.2.3+b" }, "semantic version"},
		"leading zero":           {func(r *release) { r.version = "v1.02.3" }, "semantic version"},
		"no digest":              {func(r *release) { r.digest = "sha256:12" }, "digest"},
		"no name":                {func(r *release) { r.image = "" }, "-image is needed"},
		"no image in manifests":  {put("a: b\n"), "no line"},
		"another image":          {put("image: localhost/nodeproxy:latest\nimage: busybox\n"), "not an image of the release"},
		"image with another tag": {put("image: localhost/nodeproxy:latest\nimage: localhost/nodeproxy:v1\n"), "not an image of the release"},
		"no repository":          {chart("values.yaml", "image: {}\n"), `0 lines begin with "repository:"`},
		"two repositories":       {chart("values.yaml", "repository: a\nb:\n  repository: c\n"), `2 lines begin with "repository:"`},
		"no digest in the chart": {chart("Chart.yaml", "version: 0\nappVersion: 0\n"), `0 lines begin with "nodeproxy/image-digest:"`},
		"no packages":            {root(), "no packages"},
		"no copyright file":      {root(oci.Regular("var/lib/dpkg/status.d/a", []byte("Package: a\nVersion: 1\nArchitecture: all\n"))), "a: no copyright file"},
		"no binary":              {func(r *release) { r.binaries[0].file = r.manifests[0].file }, "iptables.yaml"},
	} {
		r := input(t)
		c.change(&r)
		if err := r.run(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", what, err, c.says)
		}
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	r := release{version: "v1.2.3", digest: digestOfImage, image: image, name: name, output: "a", chart: "b"}
	if err := r.run(); err == nil || !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH") {
		t.Errorf("no time: %v", err)
	}
	for _, value := range []string{"", "a", "a=", "=b"} {
		var to []pair
		if err := pairs(&to)(value); err == nil {
			t.Errorf("%q is taken", value)
		}
	}
}

// TestSPDX: Debian's names of licenses get identifiers that SPDX has.
func TestSPDX(t *testing.T) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/CycloneDX/cyclonedx-go").Output()
	require.NoError(t, err)
	list, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "schema", "spdx.schema.json"))
	require.NoError(t, err)
	for _, name := range slices.AppendSeq([]string{"GPL-1+", "GPL-2", "GPL-2.0+", "GPL-3+", "LGPL-2+", "LGPL-2.1", "LGPL-3"}, maps.Keys(others)) {
		if l := spdx(name); l.Name != "" || !strings.Contains(string(list), `"`+l.ID+`"`) {
			t.Errorf("%s is %+v", name, l)
		}
	}
	if l := spdx("custom"); l.Name != "custom" || l.ID != "" {
		t.Errorf("custom is %+v", l)
	}
}

// TestLicenses: the licenses of all modules that the program is made of are found, so that a release can be made of them.
func TestLicenses(t *testing.T) {
	list, err := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if .Version}}{{.Path}}@{{.Version}}{{end}}{{end}}", "nodeproxy/cmd/nodeproxy").Output()
	require.NoError(t, err)
	modules := slices.Compact(slices.Sorted(slices.Values(strings.Fields(string(list)))))
	known, err := licensesOf(modules)
	require.NoError(t, err)
	if len(known) != len(modules) || len(known) < 10 {
		t.Errorf("the licenses of %d of %d modules", len(known), len(modules))
	}
	for module, want := range map[string]string{"k8s.io/api": "Apache-2.0", "github.com/spf13/pflag": "BSD-3-Clause", "github.com/vishvananda/netlink": "Apache-2.0"} {
		i := slices.IndexFunc(modules, func(m string) bool { return strings.HasPrefix(m, module+"@") })
		if i < 0 {
			t.Errorf("%s is not part of the program", module)
		} else if got := *known[modules[i]]; len(got) != 1 || got[0].License.ID != want {
			t.Errorf("%s: %+v, want %s", module, got, want)
		}
	}
}
