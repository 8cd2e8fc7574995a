package inspect

import (
	"fmt"
	"io"
	"time"

	"nodeproxy/source"
)

// SetVerification adds a verification, and what is wrong by it.
func (s *Status) SetVerification(v *source.Verification) {
	s.Verification = v
	if n := len(v.Differences); n > 0 {
		s.Wrong = append(s.Wrong, fmt.Sprintf("The verification has found %s, and repaired %s: the log has each.",
			counted(n, "difference"), either(n == 1, "it", "them")))
	}
	for _, c := range v.Compared {
		if c.Not != "" {
			s.Wrong = append(s.Wrong, fmt.Sprintf("The verification could not compare all %s: %s. To do: ask again in a minute.", c.What, c.Not))
		}
	}
	if !v.Finished {
		s.Wrong = append(s.Wrong, "The verification has not ended yet: something differs, or an answer is late. To do: ask again in a minute.")
	}
}

// writeVerification writes what was compared, and what differed.
func writeVerification(w io.Writer, v source.Verification, now time.Time) {
	var lines []string
	for _, c := range v.Compared {
		lines = append(lines, fmt.Sprintf("%d %s", c.Count, c.What))
	}
	for _, d := range v.Differences {
		lines = append(lines, "differed, and was repaired: "+d.String())
	}
	writeList(w, "Verified "+since(v.Began, now)+" ago", lines)
}
