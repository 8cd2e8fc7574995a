package drift

import (
	"fmt"
	"io"
	"strings"

	"github.com/pmezard/go-difflib/difflib"
)

// Hunk is one thing as text, before and after a change: a chain with its rules, a virtual server with its real servers, or the elements of a
// map that are one Service's. Lines are as the usual program prints them, such as iptables-save.
type Hunk struct {
	Kind Kind
	// File is what the thing is part of, with the program that prints such lines: "ipv4 nat (iptables-save)". Hunks of one File come
	// one after the other.
	File string
	// Object names the thing.
	Object string
	// Services are those that the differing lines are for: "namespace/name". It is empty for what is not one Service's, and for a thing of
	// a Service that is not known any more.
	Services   []string
	Have, Want []string
}

// Lines counts the lines that are added and removed.
func (h Hunk) Lines() (added, removed int) {
	for _, op := range h.matcher().GetOpCodes() {
		if op.Tag != 'e' {
			added, removed = added+op.J2-op.J1, removed+op.I2-op.I1
		}
	}
	return added, removed
}

// Differing calls each with the lines that are removed and added.
func (h Hunk) Differing(each func(line string)) {
	for _, op := range h.matcher().GetOpCodes() {
		if op.Tag == 'e' {
			continue
		}
		for _, line := range h.Have[op.I1:op.I2] {
			each(line)
		}
		for _, line := range h.Want[op.J1:op.J2] {
			each(line)
		}
	}
}

func (h Hunk) matcher() *difflib.SequenceMatcher {
	return difflib.NewMatcherWithJunk(h.Have, h.Want, false, nil)
}

// Unified prints hunks as a unified diff. Line numbers count the lines of each thing from its beginning, so for a chain that exists they
// are one more than those of its rules.
type Unified struct {
	W io.Writer
	// From and To say where the two sides come from.
	From, To string
	Color    bool

	file string
}

// context is how many lines without a difference are printed around those with one.
const context = 1

// Print prints one Hunk.
func (u *Unified) Print(h Hunk) error {
	var out strings.Builder
	line := func(color, text string) {
		if u.Color && color != "" {
			text = "\x1b[" + color + "m" + text + "\x1b[m"
		}
		out.WriteString(text + "\n")
	}
	if h.File != u.file {
		u.file = h.File
		line("1", "--- "+u.From+" "+h.File)
		line("1", "+++ "+u.To+" "+h.File)
	}
	section := h.Object
	if len(h.Services) > 0 {
		section += ": " + strings.Join(h.Services, ", ")
	}
	for _, group := range h.matcher().GetGroupedOpCodes(context) {
		first, last := group[0], group[len(group)-1]
		line("36", fmt.Sprintf("@@ -%s +%s @@ %s", span(first.I1, last.I2), span(first.J1, last.J2), section))
		for _, op := range group {
			if op.Tag == 'e' {
				for _, text := range h.Have[op.I1:op.I2] {
					line("", " "+text)
				}
				continue
			}
			for _, text := range h.Have[op.I1:op.I2] {
				line("31", "-"+text)
			}
			for _, text := range h.Want[op.J1:op.J2] {
				line("32", "+"+text)
			}
		}
	}
	_, err := io.WriteString(u.W, out.String())
	return err
}

// span is a range of lines as the header of a hunk has it.
func span(from, to int) string {
	switch to - from {
	case 0:
		return fmt.Sprintf("%d,0", from)
	case 1:
		return fmt.Sprint(from + 1)
	}
	return fmt.Sprintf("%d,%d", from+1, to-from)
}
