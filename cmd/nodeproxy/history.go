package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"nodeproxy/inspect"
)

const runningHelp = `
It asks the nodeproxy that runs on this node through its socket (--socket), which only root may do. In a DaemonSet, use "kubectl exec".
`

func historyCommand() *cobra.Command {
	i, last := &inspector{}, 0
	cmd := &cobra.Command{
		Use:   "history [[NAMESPACE/]NAME]",
		Short: "List the last syncs: why they were made, what changed, how long they took, what failed",
		Long: "history lists the last syncs of the running nodeproxy, the newest last: what had arrived, which Services changed, how many endpoints came\n" +
			"and went, how long it took, and what failed. With the name of a Service, it lists the syncs that changed it. It goes back 256 syncs,\n" +
			"or fewer where many Services change at once; comparisons in a row that find nothing to do are one line.\n\n" +
			"WHY is one or more of start, config (the configuration has changed), change (objects have changed), rest (of a large change), retry (the\n" +
			"sync before failed), drift (another program may have changed something), compare (it was time to compare everything), resync.\n" + runningHelp,
		Args: atMost(1, "one name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			svc, err := i.service(args)
			if err != nil {
				return err
			}
			list, err := i.client("").History(cmd.Context(), svc)
			if err != nil {
				return err
			}
			if last > 0 {
				list = list[max(0, len(list)-last):]
			}
			if len(list) == 0 && i.output == "" {
				text := "There has been no sync yet."
				if svc.Name != "" {
					text = fmt.Sprintf("No sync that is still known has changed Service %s.", svc)
				}
				fmt.Fprintln(cmd.OutOrStdout(), text)
				return nil
			}
			return i.show(cmd.OutOrStdout(), list, false, func(form string) error {
				return inspect.WriteHistory(cmd.OutOrStdout(), list, form == "wide", time.Now())
			})
		},
	}
	i.addRunning(cmd, "table, wide, json or yaml")
	cmd.Flags().IntVar(&last, "last", 20, "how many syncs to list; 0 for all that are known")
	return cmd
}
