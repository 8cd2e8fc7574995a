package xtables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/kernel/names"
)

// SaveCounters lists table nat with counters: each line is one that Counted understands.
func (t *Program) SaveCounters(ctx context.Context, each func(line string)) error {
	whole := false
	late, err := t.save(ctx, func(out io.Reader) error {
		return EachLine(out, func(line string) {
			whole = whole || line == "*"+string(names.NAT)
			each(line)
		})
	}, "-c", "-t", string(names.NAT))
	if late || err == nil && !whole && t.Variant == NFT {
		var r *chainReader
		if r, err = t.chainReader(names.NAT, each); err == nil {
			_, err = r.read(ctx, r.names)
		}
	}
	if err != nil {
		return fmt.Errorf("reading counters by %s: %w", t.SavePath, err)
	}
	return nil
}

// Counted takes the counters out of a line that iptables-save -c or iptables -v -S prints, such as "[3:156] -A KUBE-X -j DROP" and
// "-A KUBE-X -c 3 156 -j DROP". A line without counters is as it was.
func Counted(line string) (rule string, packets uint64) {
	if counters, rest, found := strings.Cut(line, "] "); found && strings.HasPrefix(line, "[") {
		count, _, _ := strings.Cut(counters[1:], ":")
		if packets, err := strconv.ParseUint(count, 10, 64); err == nil {
			return rest, packets
		}
		return line, 0
	}
	// A comment before them may hold it, too, and so may what a target behind them logs.
	for i := strings.LastIndex(line, " -c "); i >= 0; i = strings.LastIndex(line[:i], " -c ") {
		words := strings.SplitN(line[i+len(" -c "):], " ", 3)
		if packets, err := strconv.ParseUint(words[0], 10, 64); err == nil && len(words) > 1 {
			return strings.Join(append([]string{line[:i]}, words[2:]...), " "), packets
		}
	}
	return line, 0
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
