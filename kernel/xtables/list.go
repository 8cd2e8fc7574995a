package xtables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/kernel/names"
)

// SaveCounters lists table nat with counters, as iptables-save -c does.
func (t *Program) SaveCounters(ctx context.Context, read func(io.Reader) error) error {
	whole := false
	err := t.read(ctx, t.SavePath, "", func(out io.Reader) error {
		lines := bufio.NewReader(out)
		head, _ := lines.Peek(lines.Size()) // as far as there is that much
		whole = bytes.Contains(head, []byte("*"+string(names.NAT)+"\n"))
		return read(lines)
	}, "-c", "-t", string(names.NAT))
	if err == nil && !whole && t.Variant == NFT {
		var list strings.Builder
		if _, _, err = t.listByChain(ctx, names.NAT, func(line string) { list.WriteString(counterFirst(line)) }); err == nil {
			return read(strings.NewReader(list.String()))
		}
	}
	if err != nil {
		return fmt.Errorf("reading counters by %s: %w", t.SavePath, err)
	}
	return nil
}

// counterFirst turns a rule with counters as iptables -S prints it to how iptables-save does, with the counters in front.
func counterFirst(line string) string {
	i := strings.LastIndex(line, " -c ")
	if i < 0 {
		return line + "\n"
	}
	words := strings.SplitN(line[i+len(" -c "):], " ", 3)
	if len(words) < 2 {
		return line + "\n"
	}
	rest := strings.Join(words[2:], " ")
	return fmt.Sprintf("[%s:%s] %s %s\n", words[0], words[1], line[:i], rest)
}

// ListChain lists a chain with counters; nothing if there is no such chain.
func ListChain(t *Program, tbl names.Table, name string) ([]string, error) {
	ctx := context.Background()
	rules, err := t.list(ctx, tbl, name)
	if err == nil {
		return rules, nil
	}
	// What is said of a chain that does not exist differs from version to version.
	if failed := (*ReadError)(nil); errors.As(err, &failed) && !t.hasChain(ctx, tbl, name) {
		return nil, nil
	}
	return nil, fmt.Errorf("listing chain %s of %s: %w", name, t.Family, err)
}

// hasChain reports whether a table has a chain; true where that is not known.
func (t *Program) hasChain(ctx context.Context, tbl names.Table, name string) bool {
	if t.Variant == NFT {
		names, err := nftChains(t.Family, tbl)
		return err != nil || slices.Contains(names, name)
	}
	all, err := t.list(ctx, tbl)
	return err != nil || slices.Contains(all, "-N "+name)
}

// list lists chains of a table with counters, a line for each chain and rule: all of them, or one of that name.
func (t *Program) list(ctx context.Context, tbl names.Table, name ...string) ([]string, error) {
	args := append([]string{"-t", string(tbl), "-v", "-S"}, name...)
	if t.Variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	var lines []string
	err := t.read(ctx, t.Path, "", func(out io.Reader) error {
		return EachLine(out, func(line string) { lines = append(lines, line) })
	}, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.Path, err)
	}
	return lines, nil
}

// Packets is the number of packets of a rule, as in
// "-A KUBE-FORWARD -m conntrack --ctstate INVALID -c 3 156 -j DROP".
func Packets(rule string) uint64 {
	_, after, _ := strings.Cut(rule, " -c ")
	text, _, _ := strings.Cut(after, " ")
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0 // The line of the chain itself.
	}
	return n
}

// Chains lists chains of a table; those that do not exist are left out. It may run beside all else.
func (t *Program) Chains(ctx context.Context, tbl names.Table, list []string) (Content, error) {
	content := Content{}
	var err error
	if t.Variant == NFT {
		var exist []string
		if exist, err = nftChains(t.Family, tbl); err == nil {
			there := make(map[string]bool, len(exist))
			for _, name := range exist {
				there[name] = true
			}
			list = slices.DeleteFunc(slices.Clone(list), func(name string) bool { return !there[name] })
			err = t.listChains(ctx, tbl, list, content.Add, false)
		}
	} else { // It reads the whole table in any case.
		var lines []string
		lines, err = t.list(ctx, tbl)
		for _, line := range lines {
			content.Add(withoutCounters(line))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listing chains of table %s (%s): %w", tbl, t.Family, err)
	}
	return content, nil
}

// withoutCounters removes the counters of a rule as iptables -v -S prints it.
func withoutCounters(line string) string {
	before, after, found := strings.Cut(line, " -c ")
	if !found {
		return line
	}
	words := strings.SplitN(after, " ", 3)
	if len(words) < 3 {
		return before
	}
	return before + " " + words[2]
}
