package config

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// readmeFlag is a row of the README's table of flags.
type readmeFlag struct {
	names    []*regexp.Regexp
	defaults string
	line     string
	used     []bool
}

var (
	flagName = regexp.MustCompile("`--([a-z*-]+)`|`-(v)`")
	flagRow  = regexp.MustCompile("^\\| (`-[^|]*) \\|([^|]*)\\|([^|]*)\\|$")
)

func readmeFlags(t *testing.T) []readmeFlag {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var out []readmeFlag
	for line := range strings.Lines(string(text)) {
		m := flagRow.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		row := readmeFlag{defaults: m[2], line: strings.TrimSpace(line)}
		for _, name := range flagName.FindAllStringSubmatch(m[1], -1) {
			row.names = append(row.names, regexp.MustCompile("^"+strings.ReplaceAll(name[1]+name[2], "*", ".*")+"$"))
		}
		row.used = make([]bool, len(row.names))
		out = append(out, row)
	}
	return out
}

// TestREADMEFlags: the README's table has every flag that the help shows, with its default, and no other.
func TestREADMEFlags(t *testing.T) {
	t.Parallel()
	rows := readmeFlags(t)
	var f Flags
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	f.Add(fs)
	fs.VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden {
			return
		}
		found := 0
		for _, row := range rows {
			for i, name := range row.names {
				if !name.MatchString(flag.Name) {
					continue
				}
				found++
				row.used[i] = true
				plain := flag.DefValue == "" || flag.DefValue == "0" || flag.DefValue == "false"
				many := strings.Contains(name.String(), ".*")
				if !plain && !many && !strings.Contains(row.defaults, "`"+flag.DefValue+"`") {
					t.Errorf("--%s is %s by default: %s", flag.Name, flag.DefValue, row.line)
				}
			}
		}
		if found != 1 {
			t.Errorf("the README has --%s in %d rows of its table of flags, want 1", flag.Name, found)
		}
	})
	for _, row := range rows {
		for i, name := range row.names {
			if !row.used[i] {
				t.Errorf("there is no flag %v: %s", name, row.line)
			}
		}
	}
	if len(rows) < 20 {
		t.Errorf("only %d rows were found", len(rows))
	}
}

// TestEffectiveHasAllFlags: what is printed tells the value of every flag that has one, as a field or, where there is no field
// for it, as a comment.
func TestEffectiveHasAllFlags(t *testing.T) {
	t.Parallel()
	var f Flags
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	f.Add(fs)
	values := map[string]string{"string": "value", "bool": "true", "duration": "7m0s", "int32": "7"}
	seen := 0
	fs.VisitAll(func(flag *pflag.Flag) {
		if flagFields[flag.Name] != "" || flag.Hidden || commandFlags[flag.Name] || flag.Name == "config" {
			return // TestEveryFlagSetsItsField has the first ones.
		}
		seen++
		value := values[flag.Value.Type()]
		e, err := flagsOf(t, "--"+flag.Name+"="+value).Effective()
		if err != nil {
			t.Fatal(err)
		}
		text, err := e.YAML()
		if err != nil {
			t.Fatal(err)
		}
		if want := "\n#   --" + flag.Name + "=" + value + "\n"; !strings.Contains(string(text), want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	})
	if seen < 10 {
		t.Errorf("only %d flags were found", seen)
	}
}
