package main

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// markdown is a file of the project's documentation.
type markdown struct {
	path    string
	links   []link
	code    []codeLine
	anchors map[string]bool
}

type link struct {
	line   int
	target string
}

type codeLine struct {
	line int
	text string
}

var (
	linkTarget = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	inlineCode = regexp.MustCompile("`[^`]*`")
	linkText   = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	htmlAnchor = regexp.MustCompile(`<a (?:id|name)="([^"]+)">`)
)

// readMarkdown reads a file, as far as GitHub's renderer would see links, headings and blocks of code in it.
func readMarkdown(path string) (*markdown, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	m := &markdown{path: path, anchors: map[string]bool{}}
	fenced, blank, code := false, true, false
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<20)
	for n := 1; scanner.Scan(); n++ {
		line := scanner.Text()
		switch trimmed := strings.TrimSpace(line); {
		case strings.HasPrefix(trimmed, "```"):
			fenced, blank, code = !fenced, false, false
		case fenced:
			m.code = append(m.code, codeLine{n, line})
		case trimmed == "":
			blank = true
		case strings.HasPrefix(line, "    ") && (blank || code):
			m.code = append(m.code, codeLine{n, trimmed})
			blank, code = false, true
		default:
			blank, code = false, false
			if title, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
				m.anchors[m.slug(title)] = true
			}
			for _, a := range htmlAnchor.FindAllStringSubmatch(line, -1) {
				m.anchors[a[1]] = true
			}
			for _, l := range linkTarget.FindAllStringSubmatch(inlineCode.ReplaceAllString(line, "code"), -1) {
				m.links = append(m.links, link{n, l[1]})
			}
		}
	}
	return m, scanner.Err()
}

// slug returns the anchor that GitHub gives a heading.
func (m *markdown) slug(title string) string {
	title = linkText.ReplaceAllString(title, "$1")
	slug := strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, strings.TrimSpace(title))
	for i, first := 1, slug; m.anchors[slug]; i++ {
		slug = fmt.Sprintf("%s-%d", first, i)
	}
	return slug
}

// documentation are all files of the project's documentation.
func documentation(t *testing.T) map[string]*markdown {
	t.Helper()
	out := map[string]*markdown{}
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (strings.HasPrefix(entry.Name(), ".") && len(entry.Name()) > 2 && entry.Name() != ".github" || entry.Name() == "bin"):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".md"):
			out[path], err = readMarkdown(path)
		}
		return err
	})
	require.NoError(t, err)
	if len(out) < 12 {
		t.Fatalf("only %d files were found", len(out))
	}
	return out
}

// TestLinks: what a relative link of the documentation leads to is there, the heading too.
func TestLinks(t *testing.T) {
	t.Parallel()
	docs := documentation(t)
	links := 0
	for path, m := range docs {
		for _, l := range m.links {
			if strings.Contains(l.target, "://") || strings.HasPrefix(l.target, "mailto:") {
				continue
			}
			links++
			file, anchor, _ := strings.Cut(l.target, "#")
			to := path
			if file != "" {
				to = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(to); err != nil || strings.HasPrefix(to, "../../..") {
				t.Errorf("%s:%d: there is no %s", path, l.line, l.target)
				continue
			}
			if anchor == "" {
				continue
			}
			if other := docs[to]; other == nil || !other.anchors[anchor] {
				t.Errorf("%s:%d: %s has no heading for #%s", path, l.line, to, anchor)
			}
		}
	}
	if links < 60 {
		t.Errorf("only %d links were found", links)
	}
}

// TestREADMEInstall: both the README and that of docs/install lead to each page of docs/install.
func TestREADMEInstall(t *testing.T) {
	t.Parallel()
	docs := documentation(t)
	pages, err := filepath.Glob("../../docs/install/*.md")
	if err != nil || len(pages) < 10 {
		t.Fatalf("%q, %v", pages, err)
	}
	for _, index := range []string{"../../README.md", "../../docs/install/README.md"} {
		linked := map[string]bool{"../../docs/install/README.md": true}
		for _, l := range docs[index].links {
			linked[filepath.Join(filepath.Dir(index), l.target)] = true
		}
		for _, page := range pages {
			if !linked[page] {
				t.Errorf("%s does not lead to %s", index, page)
			}
		}
	}
}

// TestREADMENumbers: the numbers of the README's table of measurements are those of the document that it links to.
func TestREADMENumbers(t *testing.T) {
	t.Parallel()
	text := readFile(t, "../../README.md")
	rows := regexp.MustCompile(`(?m)^\| [^|]+ \| ([^|]+) \| ([^|]+) \| (1/[^|]+) \| \[[a-z]+\]\(([^#]+)#`).FindAllStringSubmatch(text, -1)
	if len(rows) != 5 {
		t.Fatalf("%d rows were found, want 5", len(rows))
	}
	for _, row := range rows {
		table := readFile(t, "../../"+row[4])
		for _, number := range row[1:3] {
			if !regexp.MustCompile(`\| ` + regexp.QuoteMeta(number) + `[ ,]`).MatchString(table) {
				t.Errorf("%s has no number %s", row[4], number)
			}
		}
		kubeProxy, nodeproxy := measured(t, row[1]), measured(t, row[2])
		var ratio float64
		if _, err := fmt.Sscanf(row[3], "1/%g", &ratio); err != nil {
			t.Fatal(err)
		}
		if got := kubeProxy / nodeproxy; got < 0.97*ratio || got > 1.03*ratio {
			t.Errorf("%s to %s is 1/%.3g, not %s", row[1], row[2], got, row[3])
		}
	}
}

// measured reads a number with a unit, as seconds or MiB.
func measured(t *testing.T, text string) float64 {
	t.Helper()
	var n float64
	var unit string
	if _, err := fmt.Sscanf(text, "%g %s", &n, &unit); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	if unit == "ms" {
		n /= 1000
	}
	return n
}

// TestSlugs: anchors are those that GitHub makes of headings.
func TestSlugs(t *testing.T) {
	t.Parallel()
	m := &markdown{anchors: map[string]bool{}}
	for _, tc := range [][2]string{
		{"Manifests that can't be read", "manifests-that-cant-be-read"},
		{"`run`, and *what* it does", "run-and-what-it-does"},
		{"See [the page](x.md) v1.2", "see-the-page-v12"},
		{"Again", "again"}, {"Again", "again-1"}, {"Again", "again-2"},
	} {
		got := m.slug(tc[0])
		m.anchors[got] = true
		if got != tc[1] {
			t.Errorf("%q is %q, want %q", tc[0], got, tc[1])
		}
	}
}

var (
	commandStart = regexp.MustCompile(`^(?:.*\| |.*-- |\$ |# |sudo |bin/)*nodeproxy( |$)`)
	commandEnd   = regexp.MustCompile(` +#|\s*[|>&;<]| \\$`)
	makeTarget   = regexp.MustCompile(`^make ([a-z][a-z0-9-]*)`)
	kustomized   = regexp.MustCompile(`^kubectl (?:apply|delete) -k (\S+)`)
	chartInstall = regexp.MustCompile(`^helm (?:install|upgrade) \S+ (deploy/\S+)`)
)

// TestCommandsInDocumentation: the commands in blocks of code are ones that there are: nodeproxy's with their flags, make's targets, and the
// directories that kubectl and helm are given.
func TestCommandsInDocumentation(t *testing.T) {
	t.Parallel()
	makefile := readFile(t, "../../Makefile")
	seen := map[string]int{}
	for path, m := range documentation(t) {
		if strings.HasSuffix(path, "docs/cli.md") {
			continue // It is made of the commands themselves.
		}
		for _, c := range m.code {
			text := c.text
			place := fmt.Sprintf("%s:%d", path, c.line)
			for kind, directory := range map[string]*regexp.Regexp{"kubectl": kustomized, "helm": chartInstall} {
				if d := directory.FindStringSubmatch(text); d != nil {
					seen[kind]++
					if info, err := os.Stat(filepath.Join("../..", d[1])); err != nil || !info.IsDir() {
						t.Errorf("%s: there is no directory %s", place, d[1])
					}
				}
			}
			if target := makeTarget.FindStringSubmatch(text); target != nil {
				seen["make"]++
				if !regexp.MustCompile(`(?m)^` + target[1] + `:`).MatchString(makefile) {
					t.Errorf("%s: there is no make %s", place, target[1])
				}
			}
			start := commandStart.FindString(text)
			if start == "" {
				continue
			}
			text = text[len(start):]
			if end := commandEnd.FindStringIndex(text); end != nil {
				text = text[:end[0]]
			}
			seen["nodeproxy"]++
			assert.NoError(t, parses(strings.Fields(text)), "%s: nodeproxy %s", place, text)
		}
	}
	for kind, least := range map[string]int{"nodeproxy": 40, "make": 15, "kubectl": 2, "helm": 2} {
		if seen[kind] < least {
			t.Errorf("only %d commands of %s were found, want %d", seen[kind], kind, least)
		}
	}
}

// parses fails if the arguments are not a command line that some command takes. It runs nothing.
func parses(args []string) error {
	cmd := documented()
	if slices.Contains(args, "--version") {
		return nil
	}
	sub, rest, err := cmd.Find(args)
	if err != nil {
		return err
	}
	if err := sub.ParseFlags(rest); err != nil {
		return err
	}
	if err := sub.ValidateArgs(sub.Flags().Args()); err != nil {
		return err
	}
	if sub.PreRunE != nil { // It refuses flags that mean nothing to the command.
		return sub.PreRunE(sub, sub.Flags().Args())
	}
	return nil
}

// TestParses: a command line that no command takes is found.
func TestParses(t *testing.T) {
	t.Parallel()
	for _, wrong := range []string{"explian x", "run --mod=ipvs", "explain --masquerade-bit=3 x", "explain", "render --socket=/s m", "status now"} {
		if parses(strings.Fields(wrong)) == nil {
			t.Errorf("nodeproxy %s is not found wrong", wrong)
		}
	}
}
