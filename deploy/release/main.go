// Command release makes the parts of a release that are text or made of text: the chart, as a tarball and as an OCI artifact, the
// manifests, and the bill of materials. hack/release calls it. The same input gives the same bytes.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"nodeproxy/deploy/oci"
)

func main() {
	var r release
	flag.StringVar(&r.version, "version", "", "version of nodeproxy, such as v1.2.3")
	flag.StringVar(&r.image, "image", "", "name of the image without a tag")
	flag.StringVar(&r.digest, "digest", "", "digest of the image")
	flag.StringVar(&r.name, "name", "", "what the files of deploy call the image, without a tag")
	flag.StringVar(&r.output, "output", "", "directory to write to")
	flag.StringVar(&r.chart, "chart", "", "directory of the chart")
	flag.Func("manifests", "NAME=FILE: manifests that kustomize has rendered; may be repeated", pairs(&r.manifests))
	flag.Func("binary", "ARCH=FILE: nodeproxy for an architecture; may be repeated", pairs(&r.binaries))
	flag.Func("root", "ARCH=FILE: a tar archive of the image's root file system; may be repeated", pairs(&r.roots))
	flag.Parse()
	if err := r.run(); err != nil {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

type release struct {
	version, image, digest, name, output, chart string
	manifests, binaries, roots                  []pair

	epoch time.Time
}

type pair struct{ name, file string }

func pairs(to *[]pair) func(string) error {
	return func(value string) error {
		name, file, _ := strings.Cut(value, "=")
		if name == "" || file == "" {
			return errors.New("want NAME=FILE")
		}
		*to = append(*to, pair{name, file})
		return nil
	}
}

var (
	// Without build metadata, the "+" of which a tag must not have.
	semantic = regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$`)
	digest   = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

func (r *release) run() error {
	if !semantic.MatchString(r.version) {
		return fmt.Errorf("-version %q is not a semantic version, such as v1.2.3", r.version)
	}
	if !digest.MatchString(r.digest) {
		return fmt.Errorf("-digest %q is not the digest of an image", r.digest)
	}
	for name, value := range map[string]string{"-image": r.image, "-name": r.name, "-output": r.output, "-chart": r.chart} {
		if value == "" {
			return fmt.Errorf("%s is needed", name)
		}
	}
	var err error
	if r.epoch, err = oci.Epoch(); err != nil {
		return err
	}
	for _, m := range r.manifests {
		if err := r.pin(m); err != nil {
			return fmt.Errorf("%s: %w", m.file, err)
		}
	}
	if err := r.packChart(); err != nil {
		return fmt.Errorf("%s: %w", r.chart, err)
	}
	return r.materials()
}

func (r *release) write(name string, content []byte) error {
	return os.WriteFile(filepath.Join(r.output, name), content, 0o644)
}

// number is the version as charts and bills of materials write it.
func (r *release) number() string { return strings.TrimPrefix(r.version, "v") }

// pin writes manifests that name this release's image by its digest.
func (r *release) pin(m pair) error {
	text, err := os.ReadFile(m.file)
	if err != nil {
		return err
	}
	old := "image: " + r.name + ":latest\n"
	if strings.Count(string(text), old) == 0 {
		return fmt.Errorf("no line %q", strings.TrimSpace(old))
	}
	pinned := strings.ReplaceAll(string(text), old, fmt.Sprintf("image: %s@%s\n", r.image, r.digest))
	for line := range strings.Lines(pinned) {
		if _, image, found := strings.Cut(line, "image: "); found && !strings.HasSuffix(image, "@"+r.digest+"\n") {
			return fmt.Errorf("%q is not an image of the release", strings.TrimSpace(line))
		}
	}
	head := fmt.Sprintf("# nodeproxy %s: kubectl apply -f %s.yaml\n", r.version, m.name)
	return r.write(m.name+".yaml", []byte(head+pinned))
}

// substitute replaces the one line that begins like this, however it is indented.
func substitute(text, begins, with string) (string, error) {
	lines := slices.Collect(strings.Lines(text))
	done := 0
	for i, line := range lines {
		bare := strings.TrimLeft(line, " ")
		if strings.HasPrefix(bare, begins) {
			lines[i] = line[:len(line)-len(bare)] + with + "\n"
			done++
		}
	}
	if done != 1 {
		return "", fmt.Errorf("%d lines begin with %q, want one", done, begins)
	}
	return strings.Join(lines, ""), nil
}
